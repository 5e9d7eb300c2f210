// Plays pi's part for its extension: node pi.mjs CWD EXTENSION, or, with pi's own loader,
// node pi.mjs CWD AGENT_DIR PACKAGE. Does what comes on stdin, a line of JSON each, and tells on stdout what
// the extension did and what it was answered.
import path from "node:path";
import { createInterface } from "node:readline";
import { pathToFileURL } from "node:url";

const [cwd, place, pi] = process.argv.slice(2);
const say = (what) => process.stdout.write(`${JSON.stringify(what)}\n`);
const sendMessage = (message, options) => say({ sent: message, options });

async function load() {
  const handlers = new Map();
  const tools = new Map();
  const on = (name, handler) => handlers.set(name, [...(handlers.get(name) ?? []), handler]);
  const registerTool = (tool) => tools.set(tool.name, tool);
  const { default: extension } = await import(pathToFileURL(place));
  extension({ on, registerTool, sendMessage });
  return { handlers, tools: () => [...tools.values()] };
}

async function loadByPi() {
  const loader = path.join(pi, "dist/core/extensions/loader.js");
  const { discoverAndLoadExtensions } = await import(pathToFileURL(loader));
  const { extensions, errors, runtime } = await discoverAndLoadExtensions([], cwd, place);
  if (errors.length > 0) throw new Error(JSON.stringify(errors));
  runtime.sendMessage = sendMessage;
  const [{ handlers, tools }] = extensions;
  return { handlers, tools: () => [...tools.values()].map(({ definition }) => definition) };
}

const { handlers, tools } = await (pi ? loadByPi() : load());
const ctx = { cwd, hasUI: true, ui: { notify: (text, kind) => say({ told: text, kind }) } };
const calls = new Map();

async function emit(event) {
  for (const handler of handlers.get(event.type) ?? []) await handler(event, ctx);
  say({ handled: event.type });
}

function call({ call: id, tool, args }) {
  const stop = new AbortController();
  calls.set(id, stop);
  const found = tools().find(({ name }) => name === tool);
  found.execute(String(id), args, stop.signal, undefined, ctx).then(
    (result) => say({ answered: id, result }),
    ({ message }) => say({ answered: id, error: message }),
  );
}

for await (const line of createInterface({ input: process.stdin })) {
  const wanted = JSON.parse(line);
  if (wanted.event) await emit(wanted.event);
  else if (wanted.cancel) calls.get(wanted.cancel).abort();
  else if (wanted.call) call(wanted);
  else say({ tools: tools().map(({ execute: _, ...tool }) => tool) });
}
