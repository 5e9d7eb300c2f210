// The page of `commsd web`. What others have written is only ever set as text.

/** How long changes are gathered before what is shown is fetched anew, ms. */
const GATHER = 500;
/** Messages of a conversation that are shown. */
const SHOWN = 200;
/** Everything is fetched anew so often: not all that changes is told. */
const REFRESH = 15000;
/** Pause before the stream of news is opened again after the server has refused it, ms. */
const REOPEN = 3000;

const $ = (id) => document.getElementById(id);

/** What is known: nothing is kept beyond the page. */
const known = { me: null, agents: [], rooms: [], inbox: [], talk: null, messages: [] };

// --- asking ------------------------------------------------------------------------------------

/** Asks the daemon, as the page's agent or as the operator. */
async function ask(method, params = {}, as = "agent") {
  const answer = await fetch("/api", {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({ method, params, as }),
  });
  if (!(answer.headers.get("content-type") ?? "").startsWith("application/json")) {
    throw new Error((await answer.text()).trim() || `HTTP ${answer.status}`);
  }
  const { result, error } = await answer.json();
  if (error) throw new Error(error.todo ? `${error.message} — ${error.todo}` : error.message);
  return result;
}

function complain(error) {
  $("notice").textContent = error ? (error.message ?? String(error)) : "";
  $("notice").hidden = !error;
}

/** Does what a button or form is for, and says what went wrong. */
async function act(button, work) {
  if (button) button.disabled = true;
  try {
    await work();
    complain(null);
  } catch (error) {
    complain(error);
  } finally {
    if (button) button.disabled = false;
  }
  soon();
}

// --- making ------------------------------------------------------------------------------------

/** An element with text or elements in it. */
function make(tag, options, ...inside) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(options ?? {})) {
    if (name === "click") element.addEventListener("click", value);
    else if (name === "key") element.dataset.key = value;
    else if (name === "class") element.className = value;
    else element.setAttribute(name, value);
  }
  element.append(...inside);
  return element;
}

/** Somebody else's words: their direction stays theirs. */
const words = (text) => make("bdi", null, text ?? "");
const short = (id) => (id ?? "").slice(0, 12);
const roomName = (path) => (path ?? "").split("/").slice(1).join("/");
const time = (iso) => new Date(iso).toLocaleString();
const who = (name, id) => make("span", null, words(name ?? "somebody"), ` ${short(id)}`);
/** What sets whoever writes or asks apart from the agents of one's own user on this machine. */
function whose({ fromMachine, fromUser }) {
  if (fromMachine) return [" (on machine ", words(fromMachine), ")"];
  if (!fromUser) return [];
  return [fromUser === "other" ? " (another user's)" : " (whose it is, nobody can say)"];
}
const button = (text, key, click, label) => {
  const made = make("button", { type: "button", key }, text);
  if (label) made.setAttribute("aria-label", label);
  made.addEventListener("click", () => act(made, click));
  return made;
};

/** Shows rows in the place of others; the keyboard stays where it was. */
function show(id, rows, none) {
  const place = $(id);
  const key = place.contains(document.activeElement) ? document.activeElement.dataset.key : null;
  const empty = none ? [make("li", { class: "quiet" }, none)] : [];
  place.replaceChildren(...(rows.length ? rows : empty));
  if (key) [...place.querySelectorAll("[data-key]")].find((e) => e.dataset.key === key)?.focus();
}

function showMachine(status) {
  const health = status.health.map((found) =>
    make("li", { class: found.severity }, `${found.severity} ${found.code}: `, words(found.text),
      make("p", { class: "quiet" }, words(found.todo))));
  show("health", health, "Everything is as it should be.");
  const uptime = Math.round(status.uptimeMs / 60000);
  const rows = [
    ["Version", status.version],
    ["Process", `${status.pid}, for ${uptime} min`],
    ["Device", status.device],
    ["Port", `${status.port.number}, ${status.port.held ? "held here" : "held elsewhere"}`],
    ["Coordinator", status.coordinator.holder ? `${short(status.coordinator.holder)}${status.coordinator.held ? ", here" : ""}` : "none"],
    ["Agents here", String(status.agents)],
    ["Waiting", `${status.queues.outgoing} to go out, ${status.queues.inbound} unread`],
  ];
  if (status.hub) rows.push(["Hub", `${status.hub.url}, ${status.hub.since ? "connected" : "not connected"}`]);
  $("status").replaceChildren(...rows.flatMap(([name, value]) => [make("dt", null, name), make("dd", null, words(value))]));
  const peers = status.peers.map((peer) =>
    make("li", null, short(peer.device), make("p", { class: "quiet" },
      words(peer.address), peer.machineLocal ? ", this machine" : ", elsewhere", `, since ${time(peer.since)}`)));
  show("peers", peers, "No peers.");
}

function showRooms() {
  const rows = known.rooms.map((room) => make("li", null,
    words(room.name), make("p", { class: "quiet" }, `${room.type}, ${room.members} in it `, words(room.description)),
    make("p", { class: "row" }, room.joined
      ? button("Open", room.path, () => open({ room: room.path, name: room.name }), `Open ${room.name}`)
      : button("Join", room.path, () => join(room.path), `Join ${room.name}`))));
  show("rooms", rows, "No rooms.");
}

function showAgents() {
  const rows = known.agents.filter((agent) => agent.id !== known.me).map((agent) => make("li", null,
    who(agent.name, agent.id),
    make("p", { class: "quiet" }, `${agent.status}, ${agent.local ? "here" : "elsewhere"}, `, words(agent.harness), " ", words(agent.cwd)),
    make("p", { class: "row" }, button("Write", agent.id, () => open({ agent: agent.id, name: agent.name }), `Write to ${agent.name}`))));
  show("agents", rows, "Nobody else.");
}

/** What became of a message. */
function fate(status) {
  switch (status) {
    case "delivered": return "has arrived";
    case "read": return "was read";
    case "queued": return "waits, and is tried again:";
    case "awaiting_consent": return "waits until it is let in";
    case "refused": return "was refused:";
    case "dropped": return "was dropped: there was no room, or no leave, for it";
    case "expired": return "was given up: it waited for too long";
    default: return `is ${status.replaceAll("_", " ")}`;
  }
}

/** What an event of the mailbox says, in a line. */
function tell(event) {
  const room = (path) => words(roomName(path));
  const agent = who(event.agentName, event.agent);
  switch (event.type) {
    case "dm":
      return [who(event.fromName, event.message.from), ...whose(event), " wrote:", make("p", { class: "said" }, words(event.message.content))];
    case "room_message":
      return [who(event.fromName, event.message.from), ...whose(event), " in ", room(event.message.room), ":",
        make("p", { class: "said" }, words(event.message.content))];
    case "room_invite":
      return [who(event.fromName, event.from), ...whose(event), " invites you to ", room(event.room)];
    case "room_join_request":
      // The path of a conversation has both ids in it.
      return event.room.includes("+")
        ? [who(event.requesterName, event.requesterId), ...whose(event), " asks to write to you"]
        : [who(event.requesterName, event.requesterId), ...whose(event), " asks to join ", room(event.room)];
    case "connection_request":
      return ["The machine ", who(event.name, event.peerId), " asks to connect"];
    case "capability_request":
      return [who(event.requesterName, event.requesterDevice), ...whose(event), " asks for ", words(event.capability), " on ", words(event.scopePath)];
    case "capability_outcome":
      return event.accepted
        ? ["You have ", words(event.capability), " on ", words(event.scopePath)]
        : ["You do not get ", words(event.capability), " on ", words(event.scopePath), " ", words(event.reason ?? event.code)];
    case "member_joined":
      return [agent, " has joined ", room(event.room)];
    case "member_left":
      return event.own ? ["You are no longer in ", room(event.room), ": its owner put you out"]
        : [agent, " has left ", room(event.room)];
    case "member_status":
      return [agent, ` is ${event.status} in `, room(event.room)];
    case "name_changed":
      return [who(event.newName, event.agent), " was called ", words(event.oldName), " before"];
    case "invite_declined":
      return [agent, " does not come to ", room(event.room), " ", words(event.reason)];
    case "delivery_status":
      return ["Your message to ", agent, ` ${fate(event.delivery.status)} `, words(event.delivery.reason ?? event.delivery.code)];
    case "messages_read":
      return [agent, ` has read ${event.messageIds.length} of your messages`];
    case "room_members":
      return [`${event.members.length} are in `, room(event.room)];
    case "join_outcome":
      if (event.code === "destroyed") return [room(event.room), " is no more: ", words(event.reason)];
      return [room(event.room), event.accepted ? (event.reason ? ": " : ": you are let in") : ": you are not let in ", words(event.reason)];
    default:
      // Of a newer daemon than this page.
      return ["News: ", words(event.type.replaceAll("_", " "))];
  }
}

function showInbox() {
  show("inbox", known.inbox.map((event) => make("li", null, ...tell(event))), "Nothing unread.");
  $("read").hidden = !known.inbox.length;
}

/** What somebody asks for, in words. */
function wanted(asked) {
  switch (asked.kind) {
    case "dm": return ["asks to write to you"];
    case "room": return ["asks to join ", words(roomName(asked.room))];
    case "invite": return ["invites you to ", words(roomName(asked.room))];
    case "capability": return ["asks for ", words(asked.capability), " on ", words(asked.share), ", for 30 days"];
    case "mesh": return ["asks to connect to this machine"];
    default: return [words(asked.kind)];
  }
}

function showAsks(asks, approvals) {
  const rows = asks.map((asked) => {
    // On permissions and machines the machine's user decides, on the rest the agent that is asked.
    const as = asked.kind === "capability" || asked.kind === "mesh" ? "operator" : "agent";
    const name = asked.requesterName ?? short(asked.requester);
    return make("li", null, who(asked.requesterName, asked.requester), ...whose(asked), " ", ...wanted(asked),
      make("p", { class: "quiet" }, `since ${time(asked.at)}, full id ${asked.requester}`),
      make("p", { class: "row" },
        button("Yes", `yes ${asked.id}`, () => ask("accept", { id: asked.id }, as), `Yes to ${name}`),
        button("No", `no ${asked.id}`, () => ask("reject", { id: asked.id }, as), `No to ${name}`)));
  });
  const work = approvals.map((asked) => {
    const answer = (approve) => () => ask("acp", { op: "answer", id: asked.id, approve }, "operator");
    return make("li", null, `Work, ${asked.gate}: `, words(asked.title),
      make("p", { class: "quiet" }, "with ", words(asked.peer), `, until ${time(asked.expiresAt)}`),
      ...(asked.about ?? []).map((line) => make("p", { class: "said" }, words(line))),
      make("p", { class: "row" },
        button("Yes", `yes ${asked.id}`, answer(true), `Yes to ${asked.gate} of ${asked.title}`),
        button("No", `no ${asked.id}`, answer(false), `No to ${asked.gate} of ${asked.title}`)));
  });
  show("asks", [...rows, ...work], "Nobody waits for you.");
}

function showTalk() {
  const talk = known.talk;
  $("say").hidden = !talk;
  $("leave").hidden = !talk?.room;
  if (!talk) {
    $("talk-about").textContent = "Choose a room or an agent.";
    show("messages", []);
    return;
  }
  $("talk-about").replaceChildren(talk.room ? "Room " : "With ", words(talk.name), ` ${short(talk.agent)}`,
    talk.to ? "(who that is turns out when you write)" : "");
  const list = $("messages");
  const atEnd = list.scrollHeight - list.scrollTop - list.clientHeight < 40;
  show("messages", known.messages.map((message) => make("li", null,
    who(message.fromName, message.from), " ", make("time", { class: "quiet", datetime: message.at }, time(message.at)),
    make("p", { class: "said" }, words(message.text)))), "No messages yet.");
  if (atEnd) list.scrollTop = list.scrollHeight;
}

// --- doing -------------------------------------------------------------------------------------

async function open(talk) {
  known.talk = talk;
  known.messages = [];
  $("sent").textContent = "";
  await readTalk();
  $("say-text").focus();
}

async function join(room) {
  const joined = await ask("room.join", { room });
  if (joined.status) throw new Error("The owner has to decide; the inbox will tell.");
  await open({ room: joined.path, name: joined.name });
}

/** What a conversation shows next: what follows the last message that is shown, or the newest anew. */
async function nextMessages(room, shown) {
  const last = shown.at(-1);
  if (last?.seq > 0) {
    // With that one, by which it is seen whether its number is still its own: numbers begin again.
    const since = last.seq - 1;
    const { messages, more } = await ask("room.history", { room, limit: SHOWN, since });
    if (!more && messages[0]?.id === last.id) return [...shown, ...messages.slice(1)].slice(-SHOWN);
  }
  return (await ask("room.history", { room, limit: SHOWN })).messages;
}

/** Fetches what the conversation has that is not shown yet. */
async function readTalk() {
  const talk = known.talk;
  // Nobody knows yet whom a typed name means, so there is nothing to fetch.
  if (!talk || talk.to) return showTalk();
  const shown = known.messages;
  try {
    const messages = await nextMessages(talk.room ?? talk.agent, shown);
    // Meanwhile another one may have been chosen, or this one been read.
    if (known.talk !== talk || known.messages !== shown) return;
    known.messages = messages;
  } catch (error) {
    // With an agent that was never written to there is none.
    if (talk.room) throw error;
  }
  showTalk();
}

/** Fetches everything that is shown. */
async function refresh() {
  const [watching, inbox, pending, approvals] = await Promise.all([
    ask("watch"),
    ask("inbox", { max: 100, peek: true }),
    ask("pending.list"),
    ask("acp", { op: "list_approvals" }, "operator").catch(() => ({ approvals: [] })),
  ]);
  const { status, agents, rooms } = watching.snapshot;
  Object.assign(known, { agents, rooms, inbox: inbox.events });
  showMachine(status);
  showRooms();
  showAgents();
  showInbox();
  showAsks(pending.requests, approvals.approvals);
  await readTalk();
}

let due = null;
let busy = false;
/** Fetches anew, once for all that happens within a moment, and one after the other. */
function soon() {
  due ??= setTimeout(async () => {
    due = null;
    // One that nobody sees is fetched when somebody does.
    if (document.hidden) return;
    if (busy) return soon();
    busy = true;
    try {
      await refresh();
    } catch (error) {
      complain(error);
    } finally {
      busy = false;
    }
  }, GATHER);
}

$("say").addEventListener("submit", (event) => {
  event.preventDefault();
  const talk = known.talk;
  const { room, agent, to } = talk;
  const text = $("say-text").value;
  act(event.submitter, async () => {
    const sent = await (room ? ask("send", { room, text }) : ask("dm.send", { agent: agent ?? to, text }));
    // The daemon has found out whom the typed name means; from now on it is that one.
    const [found] = sent.deliveries;
    if (to && found && known.talk === talk) known.talk = { agent: found.agent, name: found.agentName ?? to };
    $("say-text").value = "";
    const waiting = sent.deliveries.filter((delivery) => !["delivered", "read"].includes(delivery.status));
    const state = (delivery) => `For ${delivery.agentName ?? short(delivery.agent)} it ${fate(delivery.status)}`.replace(/:$/, "");
    $("sent").textContent = waiting.length ? waiting.map(state).join("; ") : "Delivered.";
    await readTalk();
  });
});

$("leave").addEventListener("click", (event) => act(event.currentTarget, async () => {
  await ask("room.leave", { room: known.talk.room });
  known.talk = null;
  showTalk();
}));

$("join").addEventListener("submit", (event) => {
  event.preventDefault();
  act(event.submitter, async () => {
    await join($("join-room").value);
    $("join-room").value = "";
  });
});

$("write").addEventListener("submit", (event) => {
  event.preventDefault();
  act(event.submitter, async () => {
    const to = $("write-to").value;
    // The daemon says whom that means: it knows petnames, and what is ambiguous.
    await open({ to, name: to });
    $("write-to").value = "";
  });
});

$("read").addEventListener("click", (event) => act(event.currentTarget, async () => {
  const last = known.inbox.at(-1);
  if (last) await ask("events.ack", { seq: last.seq });
}));

document.addEventListener("visibilitychange", soon);

// --- news --------------------------------------------------------------------------------------

function listen() {
  const stream = new EventSource("/events");
  stream.addEventListener("state", (news) => {
    const state = JSON.parse(news.data);
    known.me = state.agent ?? known.me;
    $("connection").replaceChildren(...(state.connected
      ? ["You are ", words(state.name), ` ${short(state.agent)}; commsd ${state.version}`]
      : ["The daemon is gone: ", words(state.error.message), "; this page waits for it."]));
    if (state.connected) {
      complain(null);
      soon();
    }
  });
  for (const kind of ["event", "change", "missed"]) stream.addEventListener(kind, soon);
  stream.addEventListener("error", () => {
    $("connection").textContent = "No connection to `commsd web`; is it still running?";
    if (stream.readyState === EventSource.CLOSED) setTimeout(listen, REOPEN);
  });
}

listen();
setInterval(soon, REFRESH);
