"""Two `commsd mcp` sessions driven by the official Python SDK: register, room, consent, message, wait,
and a daemon that is killed and started again in between.

    drive.py COMMSD HOME PORT FIRST_CONTACT_PORT

Exits 0 when everything went as it should; otherwise says what did not.
"""

import asyncio
import os
import subprocess
import sys

from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client

COMMSD, HOME, PORT, FIRST_CONTACT = sys.argv[1:5]


def daemon() -> subprocess.Popen:
    return subprocess.Popen(
        [COMMSD, "run", "--home", HOME, "--no-broadcast", "--port", PORT,
         "--first-contact-port", FIRST_CONTACT],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )


def server(harness: str) -> StdioServerParameters:
    work = os.path.join(HOME, "work")
    os.makedirs(work, exist_ok=True)
    env = {"HOME": HOME, "COMMSD_NO_BROADCAST": "1", "PATH": os.environ["PATH"]}
    args = ["mcp", "--no-start", "--home", HOME, "--harness", harness]
    return StdioServerParameters(command=COMMSD, args=args, env=env, cwd=work)


class Agent:
    def __init__(self, session: ClientSession):
        self.session = session
        self.heard = ""

    async def tool(self, tool: str, **arguments) -> str:
        result = await asyncio.wait_for(self.session.call_tool(tool, arguments), 40)
        text = "\n".join(block.text for block in result.content)
        self.heard += text + "\n"
        return text

    async def action(self, **call) -> str:
        return await self.tool("agent_comms", **call)

    async def hears(self, wanted: str) -> str:
        for _ in range(10):
            if wanted in self.heard:
                heard, self.heard = self.heard, ""
                return heard
            await self.tool("wait_for_messages", timeoutSeconds=5)
        raise SystemExit(f"never heard {wanted!r}: {self.heard}")


async def main() -> None:
    running = daemon()
    try:
        async with stdio_client(server("codex")) as one, stdio_client(server("mcp")) as two:
            async with ClientSession(*one) as first, ClientSession(*two) as second:
                await first.initialize()
                await second.initialize()
                tools = [tool.name for tool in (await first.list_tools()).tools]
                own = [name for name in tools if not name.startswith("acp_")]
                assert own == ["agent_comms", "wait_for_messages", "echoes_vault"], tools
                assert len(tools) == len(own) + 9, tools
                ann, bob = Agent(first), Agent(second)
                await ann.action(action="register", name="ann")
                await bob.action(action="register", name="bob")
                await ann.action(action="create_room", room="den")
                await bob.action(action="join_room", room="den")
                await bob.action(action="send", room="den", content="hello den")
                await ann.hears("│ hello den")
                await bob.action(action="dm", target="ann", content="may I")
                await ann.hears("asks to write to you")
                pending = await ann.action(action="room_pending")
                room = next(word.rstrip(",") for word in pending.split() if "+" in word)
                requester = next(word for word in pending.split() if len(word) == 64)
                await ann.action(action="room_accept", room=room, requesterId=requester)
                await ann.hears("│ may I")
                await bob.action(action="whoami")
                running.kill()
                running.wait()
                running = daemon()
                # The sessions find the new daemon by themselves.
                for _ in range(20):
                    text = await bob.action(action="send", room="den", content="back again")
                    if text.startswith("Sent"):
                        break
                    await asyncio.sleep(0.25)
                else:
                    raise SystemExit(f"the room is gone: {text}")
                await ann.hears("│ back again")
    finally:
        running.terminate()
        running.wait()


asyncio.run(main())
print("ok")
