// Loads the page of `commsd web` in a browser's place, plays the daemon's part, and prints what the page
// showed and asked: node page.mjs PAGE.
const elements = new Map();
class Element {
  constructor() {
    Object.assign(this, { dataset: {}, inside: [], on: {}, value: "", hidden: false });
  }
  append(...inside) {
    this.inside.push(...inside);
  }
  replaceChildren(...inside) {
    this.inside = inside;
  }
  addEventListener(name, listener) {
    this.on[name] = listener;
  }
  setAttribute() {}
  contains() {
    return false;
  }
  querySelectorAll() {
    return [];
  }
  focus() {}
  get text() {
    return this.inside.map((part) => part.text ?? part).join("");
  }
}
const element = (id) => elements.get(id) ?? elements.set(id, new Element()).get(id);
globalThis.document = {
  getElementById: element,
  createElement: () => new Element(),
  addEventListener() {},
  hidden: true,
};
globalThis.EventSource = class {
  addEventListener() {}
};
// What the page does by itself after a while is not waited for.
globalThis.setInterval = () => {};
globalThis.setTimeout = () => {};

let room = [];
const asked = [];
const answers = {
  "room.join": () => ({ path: "o/hall", name: "hall" }),
  "room.history": ({ since, limit }) => {
    if (since === undefined) return { messages: room.slice(-limit), more: false };
    const after = room.filter(({ seq }) => seq > since);
    return { messages: after.slice(0, limit), more: after.length > limit };
  },
  send: () => ({ deliveries: [] }),
  "dm.send": () => ({ deliveries: [{ agent: "b".repeat(64), agentName: "bob", status: "delivered" }] }),
};
globalThis.fetch = async (_url, { body }) => {
  const { method, params } = JSON.parse(body);
  asked.push([method, params.agent ?? params.room]);
  const answer = { result: answers[method](params) };
  return { headers: new Headers({ "content-type": "application/json" }), json: async () => answer };
};

await import(process.argv[2]);
const settled = () => new Promise((done) => setImmediate(done));
const submit = async (form, field, text) => {
  element(field).value = text;
  element(form).on.submit({ preventDefault() {}, submitter: null });
  await settled();
};
// Written messages are read anew after each.
const say = () => submit("say", "say-text", "x");
const posts = (life, count) =>
  Array.from({ length: count }, (_, n) => ({ seq: n + 1, id: `${life}${n + 1}`, at: 0, text: `<${life}${n + 1}>` }));
const shown = () => {
  const all = element("messages").inside.map(({ text }) => text.match(/<(.*)>/)?.[1]);
  return [all.length, all[0], all.at(-1)];
};

const seen = {};
room = posts("a", 3);
await submit("join", "join-room", "hall");
seen.opened = shown();
room = posts("a", 5);
await say();
seen.grown = shown();
room = posts("a", 900);
await say();
seen.many = shown();
// The room is made again: its numbers begin again, and then go past those that were shown.
room = posts("b", 2);
await say();
seen.again = shown();
room = posts("c", 7);
await say();
seen.past = shown();
room = [];
await say();
seen.empty = element("messages").text;
asked.length = 0;
await submit("write", "write-to", "b".repeat(12));
seen.unknown = element("talk-about").text;
await say();
seen.found = element("talk-about").text;
seen.asked = asked;
console.log(JSON.stringify(seen));
