// Loads the plugin for OpenCode as OpenCode does (every export is called), plays OpenCode's part, and
// prints what became of it: node opencode.mjs PLUGIN. With the log of a hook that always fails, until the
// plugin has given up: node opencode.mjs PLUGIN LOG.
import { existsSync, readFileSync } from "node:fs";
import { setImmediate } from "node:timers/promises";

const exported = Object.values(await import(process.argv[2]));
const prompts = [];
let prompted;
const second = new Promise((resolve) => (prompted = resolve));
const client = {
  session: {
    get: async ({ path }) => ({ data: path.id === "helper" ? { parentID: "main" } : {} }),
    prompt: async (call) => {
      prompts.push([call.path.id, call.body.parts]);
      if (prompts.length === 2) prompted();
    },
  },
};
const hooks = await exported[0]({ client });
const after = async (sessionID, output) => {
  await hooks["tool.execute.after"]({ tool: "bash", sessionID, callID: "c" }, output);
  return output;
};
const idle = (sessionID) =>
  hooks.event({ event: { type: "session.idle", properties: { sessionID } } });

const log = process.argv[3];
if (log) {
  const waits = () => (existsSync(log) ? readFileSync(log, "utf8").split("--wait").length - 1 : 0);
  // Processes and what they say: a hook that has ended is heard to its end first.
  const open = () => process.getActiveResourcesInfo().filter((kind) => /Process|Pipe/.test(kind)).length;
  // Ours are open from their first use on.
  const before = [process.stdout, process.stderr] && open();
  const late = Date.now() + 20_000;
  await idle("main");
  while (waits() < 5 || open() > before) {
    if (Date.now() > late) throw new Error(`only ${waits()} waits, ${prompts.length} prompts`);
    await setImmediate();
  }
  await setImmediate();
  for (let n = 0; n < 3; n += 1) await idle("main");
  console.log(JSON.stringify({ prompts }));
  process.exit();
}

const text = await after("main", { title: "t", output: "done", metadata: {} });
const parts = await after("main", { content: [{ type: "text", text: "done" }] });
const helper = await after("helper", { output: "done" });
await idle("helper");
await hooks.event({ event: { type: "session.updated", properties: { sessionID: "main" } } });
await idle("main");
// The session has gone on and ends again: now the hook waits in the background.
await idle("main");
await second;
console.log(JSON.stringify({ exports: exported.length, text, parts, helper, prompts }));
