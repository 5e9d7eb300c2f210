// Brings what other agents write into OpenCode's sessions, as hooks do for Claude Code (docs/mcp.md of
// commsd): what is urgent with the result of a tool, the rest when the session is idle; an idle session
// is woken by what comes later. `commsd setup opencode` writes this file, `--remove` takes it back.
import { spawn } from "node:child_process";
import { setTimeout as sleep } from "node:timers/promises";

const COMMAND = __COMMAND__;
// How long a hook may take while OpenCode waits for it; one that waits for messages; text from a hook.
const PATIENCE_MS = 5_000;
const WAIT_SECS = 6 * 3600;
const MAX_TEXT = 64 * 1024;
// How a hook that has waited says that a message has come: by this exit code, and a text on stderr that
// begins so. Programs that cannot run say other things, some of them with the same code.
const WAKES = 2;
const MARK = "📬";
// Pause after a hook that failed, which doubles; after so many in a row none waits any more, until one
// has run that brings what there is.
const PAUSE_MS = 5_000;
const MAX_FAILURES = 5;
// Sessions whose parents are remembered.
const MAX_SESSIONS = 256;

// Runs the hook with what it is told; answers its exit code and what it printed, never an error.
function hook(told, extra = [], started = () => {}) {
  return new Promise((resolve) => {
    const [program, ...args] = COMMAND;
    const child = spawn(program, [...args, ...extra], { stdio: ["pipe", "pipe", "pipe"] });
    const printed = { out: "", err: "" };
    const take = (stream, name) => {
      stream.setEncoding("utf8");
      stream.on("data", (text) => {
        if (printed[name].length < MAX_TEXT) printed[name] += text;
      });
    };
    take(child.stdout, "out");
    take(child.stderr, "err");
    const late = extra.length === 0 ? setTimeout(() => child.kill(), PATIENCE_MS) : undefined;
    const end = (code) => {
      clearTimeout(late);
      resolve({ code, ...printed });
    };
    child.on("error", () => end(null));
    child.on("close", end);
    child.stdin.on("error", () => {});
    child.stdin.end(JSON.stringify(told));
    started(child);
  });
}

export const Commsd = async ({ client }) => {
  const parents = new Map();
  // Sessions that go on because of a message.
  const woken = new Set();
  let waiting;
  // Hooks that have failed one after the other.
  let failures = 0;

  // The text that a hook has for the model, if any.
  const brought = async (event, session, active) => {
    const told = { hook_event_name: event, session_id: session, stop_hook_active: active };
    const { code, out } = await hook(told);
    if (code !== 0) return "";
    failures = 0;
    try {
      const { reason } = JSON.parse(out);
      return typeof reason === "string" ? reason : "";
    } catch {
      return "";
    }
  };

  // A session that a model has begun for a part of its work: messages are not for it.
  const isHelper = async (session) => {
    if (!parents.has(session)) {
      if (parents.size >= MAX_SESSIONS) parents.clear();
      const found = await client.session.get({ path: { id: session } }).catch(() => undefined);
      parents.set(session, Boolean(found?.data?.parentID));
    }
    return parents.get(session);
  };
  const goOn = (session, text) => {
    if (woken.size >= MAX_SESSIONS) woken.clear();
    woken.add(session);
    const body = { parts: [{ type: "text", text }] };
    // Its answer comes when the model has ended, which nobody here waits for.
    client.session.prompt({ path: { id: session }, body }).catch(() => woken.delete(session));
  };
  const stopWaiting = () => {
    waiting?.abort();
    waiting = undefined;
  };
  const wait = async (session) => {
    stopWaiting();
    const { signal } = (waiting = new AbortController());
    const told = { hook_event_name: "Stop", session_id: session };
    while (failures < MAX_FAILURES) {
      const { code, err } = await hook(told, ["--wait", String(WAIT_SECS)], (child) => {
        signal.addEventListener("abort", () => child.kill(), { once: true });
      });
      if (signal.aborted) return;
      const text = err.trim();
      const came = code === WAKES && text.startsWith(MARK);
      if (came || code === 0) failures = 0;
      if (came) goOn(session, text);
      if (came || code === 0) return;
      const pause = PAUSE_MS * 2 ** failures++;
      await sleep(pause, undefined, { signal, ref: false }).catch(() => {});
      if (signal.aborted) return;
    }
  };
  process.on("exit", stopWaiting);

  return {
    "tool.execute.after": async (input, output) => {
      if (await isHelper(input.sessionID)) return;
      const text = await brought("PostToolUse", input.sessionID, false);
      if (!text) return;
      // Tools of MCP servers have parts, others one text.
      if (Array.isArray(output.content)) output.content.push({ type: "text", text });
      else output.output = `${output.output ?? ""}\n\n${text}`;
    },
    "chat.message": async () => stopWaiting(),
    event: async ({ event }) => {
      if (event.type !== "session.idle") return;
      const session = event.properties?.sessionID;
      if (!session || (await isHelper(session))) return;
      const text = await brought("Stop", session, woken.delete(session));
      if (text) goOn(session, text);
      else void wait(session);
    },
  };
};
