// What of the MCP conformance suite our servers do not pass, and why. A name is a scenario's, or a
// scenario's and a check's; one that is listed and passes is a failure too.

// The scenario calls, reads or gets something of the suite's own that a server is to have for it.
const fixtures = [
  "tools-call-simple-text",
  "tools-call-image",
  "tools-call-audio",
  "tools-call-embedded-resource",
  "tools-call-mixed-content",
  "tools-call-with-logging",
  "tools-call-error",
  "tools-call-with-progress",
  "tools-call-sampling",
  "tools-call-elicitation",
  "json-schema-2020-12",
  "elicitation-sep1034-defaults",
  "elicitation-sep1330-enums",
  "resources-read-text",
  "resources-read-binary",
  "resources-templates-read",
  "input-required-result-basic-elicitation",
  "input-required-result-basic-sampling",
  "input-required-result-basic-list-roots",
  "input-required-result-request-state",
  "input-required-result-multiple-input-requests",
  "input-required-result-multi-round",
  "input-required-result-missing-input-response",
  "input-required-result-non-tool-request",
  "input-required-result-result-type",
  "input-required-result-tampered-state",
  "input-required-result-capability-check",
  "input-required-result-ignore-extra-params",
  "http-custom-header-server-validation",
  "server-stateless:sep-2575-server-rejects-undeclared-capability",
  "server-stateless:sep-2575-missing-capability-http-400",
  "server-stateless:sep-2575-http-server-no-independent-requests-on-stream",
  "server-stateless:sep-2575-server-no-log-without-loglevel",
];

// Capabilities that our servers do not have and do not declare.
const undeclared = [
  "logging-set-level",
  "completion-complete",
  "resources-subscribe",
  "resources-unsubscribe",
  "prompts-list",
  "prompts-get-simple",
  "prompts-get-with-args",
  "prompts-get-embedded-resource",
  "prompts-get-with-image",
  "caching:sep-2549-prompts-list-caching-hints",
];

// Duties of an HTTP server, which ours are not and the bridge is only for the suite.
const http = [
  "dns-rebinding-protection",
  "http-header-validation",
  "server-stateless:sep-2575-http-server-header-mismatch-400",
];

// One process takes clients with a handshake and without: `initialize` is a method that it has.
const handshake = ["server-stateless:sep-2575-http-server-method-not-found-404-initialize"];

// `acp mcp-server` has tools and no resources, and declares none.
const resources = [
  "resources-list",
  "sep-2164-resource-not-found",
  "caching:sep-2549-resources-list-caching-hints",
  "caching:sep-2549-resources-templates-list-caching-hints",
];

const everywhere = [...fixtures, ...undeclared, ...http, ...handshake];

export const expected = { acp: [...everywhere, ...resources], mcp: everywhere };
