// The official MCP conformance suite against a server on stdio: a bridge that gives each session of
// the suite a process of its own, and beside it the suite itself.
//
//     conformance.mjs SUITE REVISION SERVER COMMAND ARGUMENT...
//
// SUITE is the folder in which `@modelcontextprotocol/conformance` is installed, SERVER a name in
// `conformance_expected.mjs`. Writes into the working directory. Exits 0 when what is expected to
// fail failed, and nothing else.
import { spawn } from "node:child_process";
import { randomUUID } from "node:crypto";
import { once } from "node:events";
import fs from "node:fs";
import { createServer } from "node:http";
import { register } from "node:module";
import path from "node:path";
import { createInterface } from "node:readline";
import { pathToFileURL } from "node:url";
import { expected } from "./conformance_expected.mjs";

const [suite, revision, name, command, ...args] = process.argv.slice(2);

// HTTP statuses of errors, for clients without a session: what the newest revision demands.
const statuses = { [-32601]: 404, [-32602]: 400, [-32022]: 400 };

// One server process and what waits for its answers. Ids are ours: clients without a session share
// a process, and each counts from one.
class Session {
  waiting = new Map();
  next = 1;

  constructor() {
    this.child = spawn(command, args, { stdio: ["pipe", "pipe", "inherit"] });
    createInterface({ input: this.child.stdout }).on("line", (line) => {
      const message = JSON.parse(line);
      const waiting = this.waiting.get(message.id);
      // Requests and notifications of the server have no stream to go to.
      if (message.method !== undefined || waiting === undefined) return;
      this.waiting.delete(message.id);
      waiting.answer({ ...message, id: waiting.id });
    });
  }

  say(message) {
    this.child.stdin.write(JSON.stringify(message) + "\n");
  }

  ask(message) {
    const id = this.next++;
    return new Promise((answer) => {
      this.waiting.set(id, { answer, id: message.id });
      this.say({ ...message, id });
    });
  }

  end() {
    this.child.stdin.end();
  }
}

const sessions = new Map();
let stateless;

// The session that a request belongs to; a handshake begins one, what has none needs none.
function sessionOf(request, message) {
  const id = request.headers["mcp-session-id"];
  if (id !== undefined) return [id, sessions.get(id)];
  if (message?.method !== "initialize") return [undefined, (stateless ??= new Session())];
  const fresh = randomUUID();
  sessions.set(fresh, new Session());
  return [fresh, sessions.get(fresh)];
}

async function handle(request, response) {
  const chunks = [];
  for await (const chunk of request) chunks.push(chunk);
  const message = chunks.length ? JSON.parse(Buffer.concat(chunks)) : undefined;
  if (request.method === "GET") return response.writeHead(405).end();
  const [id, session] = sessionOf(request, message);
  if (session === undefined) return response.writeHead(404).end();
  if (request.method === "DELETE") {
    session.end();
    sessions.delete(id);
    return response.writeHead(200).end();
  }
  if (message.id === undefined || message.method === undefined) {
    session.say(message);
    return response.writeHead(202).end();
  }
  const answer = await session.ask(message);
  const head = { "content-type": "application/json", ...(id && { "mcp-session-id": id }) };
  const status = (id === undefined && statuses[answer.error?.code]) || 200;
  response.writeHead(status, head).end(JSON.stringify(answer));
}

const server = createServer((request, response) => {
  handle(request, response).catch((error) => response.writeHead(400).end(String(error)));
});
server.listen(0, "127.0.0.1");
await once(server, "listening");

process.on("exit", () => [stateless, ...sessions.values()].forEach((session) => session?.child.kill()));

// The suite names a function that Node has from 22 on; no scenario for servers calls it.
if (fs.globSync === undefined) {
  const file = 'export * from "node:fs"; export { default } from "node:fs"; export const globSync = undefined;';
  const hook = `export const resolve = (name, context, next) => name === "fs"
    ? { url: ${JSON.stringify(`data:text/javascript,${encodeURIComponent(file)}`)}, shortCircuit: true }
    : next(name, context);`;
  register(`data:text/javascript,${encodeURIComponent(hook)}`);
}
const main = path.join(suite, "node_modules/@modelcontextprotocol/conformance/dist/index.js");
const url = `http://127.0.0.1:${server.address().port}/mcp`;
// YAML, of which JSON is a part.
fs.writeFileSync("expected.yml", JSON.stringify({ server: expected[name] }));
process.argv = [process.argv[0], main, "server", "--url", url, "--suite", "all"];
process.argv.push("--spec-version", revision, "--expected-failures", "expected.yml");
await import(pathToFileURL(main));
