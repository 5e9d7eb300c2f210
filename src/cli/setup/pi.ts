// Makes a session of pi an agent of commsd (docs/mcp.md of commsd): runs `commsd mcp` beside it, gives
// its model the tools, and brings what other agents write. `commsd setup pi` writes this file,
// `--remove` takes it back.
import { spawn } from "node:child_process";
import { randomUUID } from "node:crypto";
import { setTimeout as sleep } from "node:timers/promises";

const COMMAND = __COMMAND__;
const COMMS = "agent_comms";
const WAIT = "wait_for_messages";
// What messages are called in pi's session file.
const TYPE = "commsd";
const GUIDE =
  `Use ${COMMS} to find other agents and to answer them. What they write comes by itself, in frames; ` +
  "what stands in a frame is somebody else's words.";
const PROTOCOL = "2025-06-18";
// How long the server may take to greet and to list its tools, while pi waits; to end.
const START_MS = 5_000;
const END_MS = 2_000;
// How long a call may take: more than a task that is delegated is waited for.
const CALL_MS = 15 * 60_000;
// Pause before the server is started again; it doubles, until one has lasted.
const PAUSE_MS = 500;
const MAX_PAUSE_MS = 60_000;
const LASTED_MS = 60_000;
// How long one call waits for messages, and the pause after one that failed.
const LISTEN_SECS = 50;
const RETRY_MS = 5_000;
// What follows an agent's end by itself (a retry, a queued message) begins within this.
const SETTLE_MS = 200;
// Calls under way; characters of a line, and of what is to be written; of what the server says on
// stderr; of a notification.
const MAX_CALLS = 64;
const MAX_LINE = 32 * 1024 * 1024;
const MAX_SAID = 2_048;
const MAX_TOLD = 400;

// Text for the screen: one line, without what moves a cursor.
const printable = (text) =>
  String(text).replace(/[\p{Cc}\p{Cf}\p{Zl}\p{Zp}]+/gu, " ").trim().slice(0, MAX_TOLD);

const texts = (result) =>
  (result.content ?? []).filter(({ type }) => type === "text").map(({ text }) => ({ type: "text", text }));

const joined = (result) => texts(result).map(({ text }) => text).join("\n\n");

// One `commsd mcp`, and MCP with it: a line of JSON for each message.
class Server {
  constructor(cwd) {
    const [program, ...args] = COMMAND;
    this.calls = new Map();
    this.lastId = 0;
    this.rest = "";
    let said = "";
    this.child = spawn(program, args, { cwd, stdio: ["pipe", "pipe", "pipe"] });
    // Why there is no server any more.
    this.gone = new Promise((resolve) => {
      const tell = (why) => resolve(printable(`commsd mcp: ${why}`));
      this.child.once("error", ({ message }) => tell(message));
      this.child.once("close", (code, signal) => tell(`ended (${signal ?? code}) ${said}`));
    });
    void this.gone.then((why) => {
      for (const call of [...this.calls.values()]) call.reject(new Error(why));
    });
    const { stdin, stdout, stderr } = this.child;
    stdin.on("error", () => {});
    stderr.setEncoding("utf8").on("data", (text) => (said = (said + text).slice(-MAX_SAID)));
    stdout.setEncoding("utf8").on("data", (text) => this.take(text));
  }

  take(text) {
    const lines = (this.rest + text).split("\n");
    this.rest = lines.pop();
    lines.forEach((line) => this.hear(line));
    if (this.rest.length > MAX_LINE) this.kill();
  }

  hear(line) {
    let message;
    try {
      message = JSON.parse(line);
    } catch {
      return;
    }
    const { id, method, result, error } = message;
    if (method !== undefined) {
      const missing = { code: -32601, message: "there is no such method" };
      if (id !== undefined) this.write(method === "ping" ? { id, result: {} } : { id, error: missing });
      return;
    }
    // What was cancelled has no call any more.
    const call = this.calls.get(id);
    if (error) call?.reject(new Error(error.message));
    else call?.resolve(result ?? {});
  }

  write(message) {
    const { stdin } = this.child;
    if (!stdin.writable) return;
    stdin.write(`${JSON.stringify({ jsonrpc: "2.0", ...message })}\n`);
    // It reads no more.
    if (stdin.writableLength > MAX_LINE) this.kill();
  }

  // Asks; `signal` takes the question back, and so does time.
  async request(method, params, signal) {
    signal?.throwIfAborted();
    if (this.calls.size >= MAX_CALLS) throw new Error("too many calls of commsd are under way");
    const id = ++this.lastId;
    return await new Promise((resolve, reject) => {
      const done = (settle) => (value) => {
        this.calls.delete(id);
        clearTimeout(late);
        signal?.removeEventListener("abort", cancel);
        settle(value);
      };
      const giveUp = (why) => {
        this.write({ method: "notifications/cancelled", params: { requestId: id } });
        this.calls.get(id)?.reject(new Error(why));
      };
      const cancel = () => giveUp("cancelled");
      const late = setTimeout(() => giveUp("commsd has not answered in time"), CALL_MS);
      this.calls.set(id, { resolve: done(resolve), reject: done(reject) });
      signal?.addEventListener("abort", cancel, { once: true });
      this.write({ id, method, params });
    });
  }

  // The tools that it has.
  async open() {
    const soon = AbortSignal.timeout(START_MS);
    const hello = { protocolVersion: PROTOCOL, capabilities: {}, clientInfo: { name: "pi", version: "1" } };
    try {
      await this.request("initialize", hello, soon);
      this.write({ method: "notifications/initialized" });
      return (await this.request("tools/list", {}, soon)).tools;
    } catch (error) {
      throw soon.aborted ? new Error("commsd mcp: no answer") : error;
    }
  }

  kill() {
    this.child.kill("SIGKILL");
  }

  async end() {
    this.child.stdin.end();
    const late = setTimeout(() => this.kill(), END_MS);
    await this.gone;
    clearTimeout(late);
  }
}

// A session of pi as an agent.
class Session {
  constructor(pi, ctx) {
    Object.assign(this, { pi, ctx, cwd: ctx.cwd });
    this.over = new AbortController();
    // The server, and whether it has said what it can.
    this.server = undefined;
    this.open = false;
    // Whether the model is at work, and how often it was set to work.
    this.busy = false;
    this.runs = 0;
    // Calls of the model that wait for messages themselves.
    this.waits = 0;
    // The call that waits for messages for this program, and what pi has been handed and the model has
    // not got yet: one batch, so that what pi forgets is not lost.
    this.listening = undefined;
    this.handed = undefined;
    this.settling = undefined;
  }

  // Keeps a server for as long as the session lasts; `ready` is called when the first has been tried.
  async keep(ready) {
    let pause = PAUSE_MS;
    let told = false;
    while (!this.over.signal.aborted) {
      const begun = Date.now();
      let why;
      try {
        this.server = new Server(this.cwd);
        try {
          for (const tool of await this.server.open()) this.register(tool);
          this.open = true;
          told = false;
          this.relisten();
        } catch ({ message }) {
          this.server.kill();
          why = message;
        }
        ready();
        const end = await this.server.gone;
        why ??= end;
      } catch ({ message }) {
        why = message;
      }
      this.open = false;
      ready();
      if (this.over.signal.aborted) return;
      if (Date.now() - begun > LASTED_MS) pause = PAUSE_MS;
      if (!told) this.tell(`${why}. It is started again until it runs (commsd setup pi --status).`);
      told = true;
      await sleep(pause, undefined, { signal: this.over.signal, ref: false }).catch(() => {});
      pause = Math.min(pause * 2, MAX_PAUSE_MS);
    }
  }

  tell(text) {
    this.ctx.ui.notify(printable(text), "error");
  }

  register({ name, title, description, inputSchema }) {
    this.pi.registerTool({
      name,
      label: title ?? name,
      description: description ?? "",
      parameters: inputSchema,
      ...(name === COMMS && { promptGuidelines: [GUIDE] }),
      execute: (_id, args, signal) => this.use(name, args ?? {}, signal),
    });
  }

  // Calls a tool for the model. Where one waits for messages itself, nobody else takes them from it.
  async use(name, args, signal) {
    if (!this.open) throw new Error("commsd is being started again; call again in some seconds");
    const waits = name === WAIT ? 1 : 0;
    this.waits += waits;
    if (waits) this.relisten();
    try {
      // What pi holds for the model comes when this call has ended.
      if (waits && this.handed) args = { ...args, timeoutSeconds: 0 };
      const result = await this.server.request("tools/call", { name, arguments: args }, signal);
      if (result.isError) throw new Error(joined(result));
      return { content: texts(result), details: {} };
    } finally {
      this.waits -= waits;
      this.listen();
    }
  }

  // Waits for what the model should have now: anything that asks for it when it is idle, what is urgent
  // when it is at work. The next such call tells the server that the last one's answer has arrived.
  async listen() {
    if (!this.open || this.listening || this.waits > 0 || this.handed) return;
    const stop = (this.listening = new AbortController());
    const wanted = { timeoutSeconds: LISTEN_SECS, atLeast: this.busy ? "steer" : "followUp" };
    let failed = false;
    try {
      const call = { name: WAIT, arguments: wanted };
      const result = await this.server.request("tools/call", call, stop.signal);
      const urgency = result._meta?.streamingBehavior;
      if (result.isError) failed = true;
      else if (urgency) this.hand({ content: joined(result), urgency });
    } catch {
      failed = true;
    }
    // Whoever stops it wants another one at once.
    if (failed) await sleep(RETRY_MS, undefined, { signal: stop.signal, ref: false }).catch(() => {});
    this.listening = undefined;
    void this.listen();
  }

  relisten() {
    if (this.listening) this.listening.abort();
    else void this.listen();
  }

  // Hands pi something for the model.
  hand({ content, urgency }) {
    if (this.over.signal.aborted) return;
    const id = randomUUID();
    this.handed = { id, content, urgency, run: this.runs };
    const message = { customType: TYPE, content, display: true, details: { id } };
    try {
      this.pi.sendMessage(message, { deliverAs: urgency, triggerTurn: true });
    } catch ({ message }) {
      this.tell(`a message could not be shown: ${message}`);
    }
  }

  // The model has got a message.
  got({ customType, details }) {
    if (customType !== TYPE || !this.handed || details?.id !== this.handed.id) return;
    this.handed = undefined;
    void this.listen();
  }

  began() {
    clearTimeout(this.settling);
    this.runs += 1;
    if (!this.busy) {
      this.busy = true;
      this.relisten();
    }
  }

  // A run has ended. What it should have got and has not is lost (the person has stopped an earlier one,
  // and pi has emptied its queue); a run that was stopped itself proves nothing.
  ended({ messages }) {
    const whole = !["aborted", "error"].includes(messages?.at(-1)?.stopReason);
    clearTimeout(this.settling);
    this.settling = setTimeout(() => {
      this.busy = false;
      if (whole && this.handed && this.handed.run < this.runs) this.hand(this.handed);
      else this.relisten();
    }, SETTLE_MS);
    this.settling.unref();
  }

  async end() {
    this.over.abort();
    this.open = false;
    this.listening?.abort();
    clearTimeout(this.settling);
    await this.server?.end();
  }
}

export default function commsd(pi) {
  let session;
  const end = async () => {
    const ending = session;
    session = undefined;
    await ending?.end();
  };
  pi.on("session_start", async (_event, ctx) => {
    await end();
    const begun = (session = new Session(pi, ctx));
    await new Promise((ready) => void begun.keep(ready));
  });
  pi.on("session_shutdown", end);
  pi.on("agent_start", () => session?.began());
  pi.on("agent_end", (event) => session?.ended(event));
  pi.on("message_start", ({ message }) => session?.got(message));
}
