// Two `commsd mcp` sessions driven by the official TypeScript SDK: register, room, consent, message,
// wait, and a daemon that is killed and started again in between.
//
//     drive.mjs COMMSD HOME PORT FIRST_CONTACT_PORT
//
// Exits 0 when everything went as it should; otherwise says what did not.
import { spawn } from "node:child_process";
import { mkdirSync } from "node:fs";
import { once } from "node:events";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";
import path from "node:path";

const [commsd, home, port, firstContact] = process.argv.slice(2);
// The SDK is not part of this repository: it is where the gate has installed it.
const require = createRequire(path.join(process.env.COMMSD_SDK_NODE, "package.json"));
const load = (name) => import(pathToFileURL(require.resolve(name)));
const { Client } = await load("@modelcontextprotocol/sdk/client/index.js");
const { StdioClientTransport } = await load("@modelcontextprotocol/sdk/client/stdio.js");

const daemon = () =>
  spawn(
    commsd,
    ["run", "--home", home, "--no-broadcast", "--port", port, "--first-contact-port", firstContact],
    { stdio: "ignore" },
  );

class Agent {
  heard = "";

  static async start(harness) {
    const cwd = path.join(home, "work");
    mkdirSync(cwd, { recursive: true });
    const agent = new Agent();
    agent.client = new Client({ name: "drive", version: "1" });
    await agent.client.connect(
      new StdioClientTransport({
        command: commsd,
        args: ["mcp", "--no-start", "--home", home, "--harness", harness],
        env: { HOME: home, COMMSD_NO_BROADCAST: "1", PATH: process.env.PATH },
        cwd,
      }),
    );
    return agent;
  }

  async tool(name, args) {
    const result = await this.client.callTool({ name, arguments: args });
    const text = result.content.map((block) => block.text).join("\n");
    this.heard += text + "\n";
    return text;
  }

  action(call) {
    return this.tool("agent_comms", call);
  }

  async hears(wanted) {
    for (let round = 0; round < 10; round += 1) {
      if (this.heard.includes(wanted)) {
        this.heard = "";
        return;
      }
      await this.tool("wait_for_messages", { timeoutSeconds: 5 });
    }
    throw new Error(`never heard ${wanted}: ${this.heard}`);
  }
}

let running = daemon();
const agents = [];
try {
  const ann = await Agent.start("codex");
  agents.push(ann);
  const bob = await Agent.start("mcp");
  agents.push(bob);
  const { tools } = await ann.client.listTools();
  const names = tools.map((tool) => tool.name);
  const own = names.filter((name) => !name.startsWith("acp_"));
  if (own.join() !== "agent_comms,wait_for_messages,echoes_vault" || names.length !== own.length + 9) {
    throw new Error(JSON.stringify(tools));
  }
  await ann.action({ action: "register", name: "ann" });
  await bob.action({ action: "register", name: "bob" });
  await ann.action({ action: "create_room", room: "den" });
  await bob.action({ action: "join_room", room: "den" });
  await bob.action({ action: "send", room: "den", content: "hello den" });
  await ann.hears("│ hello den");
  await bob.action({ action: "dm", target: "ann", content: "may I" });
  await ann.hears("asks to write to you");
  const pending = await ann.action({ action: "room_pending" });
  const words = pending.split(/\s+/).map((word) => word.replace(/,$/, ""));
  await ann.action({
    action: "room_accept",
    room: words.find((word) => word.includes("+")),
    requesterId: words.find((word) => word.length === 64),
  });
  await ann.hears("│ may I");
  await bob.action({ action: "whoami" });
  running.kill("SIGKILL");
  await once(running, "exit");
  running = daemon();
  // The sessions find the new daemon by themselves.
  let text = "";
  for (let round = 0; round < 20; round += 1) {
    text = await bob.action({ action: "send", room: "den", content: "back again" });
    if (text.startsWith("Sent")) break;
    await new Promise((done) => setTimeout(done, 250));
  }
  if (!text.startsWith("Sent")) throw new Error(`the room is gone: ${text}`);
  await ann.hears("│ back again");
} finally {
  for (const agent of agents) await agent.client.close();
  running.kill("SIGTERM");
  await once(running, "exit");
}
console.log("ok");
