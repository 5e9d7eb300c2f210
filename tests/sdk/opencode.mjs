// Loads the plugin for OpenCode as OpenCode does (every export is called), plays OpenCode's part, and
// prints what became of it: node opencode.mjs PLUGIN.
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
