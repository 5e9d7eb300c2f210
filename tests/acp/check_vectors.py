#!/usr/bin/env python3
"""Checks the golden files of tests/vectors/acp in a second language.

Needs nothing but Python: canonical JSON and Ed25519 are written out here (slowly, from RFC 8785 and
RFC 8032), so that agreement with the Rust code is no accident of a shared library. HPKE is left to
the Rust test. Exit code 0 and one line a file when all is well.

    python3 tests/acp/check_vectors.py [DIRECTORY]
"""

import base64
import hashlib
import json
import re
import sys
from pathlib import Path

P = 2**255 - 19
Q = 2**252 + 27742317777372353535851937790883648493
D = -121665 * pow(121666, P - 2, P) % P
SQRT_M1 = pow(2, (P - 1) // 4, P)


def add(a, b):
    x = (a[1] - a[0]) * (b[1] - b[0]) % P
    y = (a[1] + a[0]) * (b[1] + b[0]) % P
    c = 2 * a[3] * b[3] * D % P
    d = 2 * a[2] * b[2] % P
    e, f, g, h = y - x, d - c, d + c, y + x
    return (e * f % P, g * h % P, f * g % P, e * h % P)


def mul(s, p):
    q = (0, 1, 1, 0)
    while s > 0:
        if s & 1:
            q = add(q, p)
        p = add(p, p)
        s >>= 1
    return q


def equal(a, b):
    return (a[0] * b[2] - b[0] * a[2]) % P == 0 and (a[1] * b[2] - b[1] * a[2]) % P == 0


def point(data):
    y = int.from_bytes(data, "little")
    sign, y = y >> 255, y & (2**255 - 1)
    if y >= P:
        return None
    x2 = (y * y - 1) * pow(D * y * y + 1, P - 2, P) % P
    x = pow(x2, (P + 3) // 8, P)
    if (x * x - x2) % P:
        x = x * SQRT_M1 % P
    if (x * x - x2) % P or (x == 0 and sign):
        return None
    if x & 1 != sign:
        x = P - x
    return (x, y, 1, x * y % P)


GY = 4 * pow(5, P - 2, P) % P
BASE = point(GY.to_bytes(32, "little"))


def small(p):
    return equal(mul(8, p), (0, 1, 1, 0))


def verify(public, message, signature):
    a, r = point(public), point(signature[:32])
    s = int.from_bytes(signature[32:], "little")
    if a is None or r is None or s >= Q or small(a) or small(r):
        return False
    h = int.from_bytes(hashlib.sha512(signature[:32] + public + message).digest(), "little") % Q
    return equal(mul(s, BASE), add(r, mul(h, a)))


BASE58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"


def key_of(did):
    if not did.startswith("did:key:z6Mk") or len(did) != 56:
        raise ValueError("no did")
    n = 0
    for c in did[9:]:
        n = n * 58 + BASE58.index(c)
    data = n.to_bytes(34, "big")
    if data[:2] != b"\xed\x01":
        raise ValueError("no Ed25519 key")
    return data[2:]


def number(n):
    """ECMAScript's text of a number."""
    if isinstance(n, int):
        return str(n)
    if n == 0:
        return "0"
    text = repr(abs(n))
    mantissa, _, exponent = text.partition("e")
    whole, _, part = mantissa.partition(".")
    part = "" if part == "0" else part
    digits = (whole + part).lstrip("0")
    at = len(whole) + int(exponent or 0) - (len(whole + part) - len((whole + part).lstrip("0")))
    digits = digits.rstrip("0")
    k = len(digits)
    if k <= at <= 21:
        out = digits + "0" * (at - k)
    elif 0 < at <= 21:
        out = digits[:at] + "." + digits[at:]
    elif -6 < at <= 0:
        out = "0." + "0" * -at + digits
    else:
        e = at - 1
        out = digits[0] + ("." + digits[1:] if k > 1 else "") + "e" + ("+" if e > 0 else "-") + str(abs(e))
    return ("-" if n < 0 else "") + out


def text(s):
    short = {8: "\\b", 9: "\\t", 10: "\\n", 12: "\\f", 13: "\\r", 34: '\\"', 92: "\\\\"}
    return '"' + "".join(short.get(ord(c)) or (f"\\u{ord(c):04x}" if ord(c) < 32 else c) for c in s) + '"'


def jcs(v):
    if v is None or v is True or v is False:
        return {None: "null", True: "true", False: "false"}[v]
    if isinstance(v, (int, float)):
        return number(v)
    if isinstance(v, str):
        return text(v)
    if isinstance(v, list):
        return "[" + ",".join(map(jcs, v)) + "]"
    names = sorted(v, key=lambda s: s.encode("utf-16-be"))
    return "{" + ",".join(text(n) + ":" + jcs(v[n]) for n in names) + "}"


def digest(v):
    return "sha256:" + hashlib.sha256(jcs(v).encode()).hexdigest()


def body(v):
    return {k: x for k, x in v.items() if k not in ("signature", "signatures")}


def b64(s):
    return base64.urlsafe_b64decode(s + "=" * (-len(s) % 4))


def signing_input(v, s):
    kind = "application/vnd.acp." + re.sub(r"(?<!^)(?=[A-Z])", "-", v["type"]).lower() + ".v1+json"
    signer = {k: s[k] for k in ("alg", "role", "signerDid", "signedAt")}
    payload = jcs({"body": body(v), "signer": signer}).encode()
    return f"DSSEv1 {len(kind)} {kind} {len(payload)} ".encode() + payload


def signed(v, s, did, role):
    assert (s["alg"], s["signerDid"], s["role"]) == ("Ed25519", did, role), v["type"]
    assert verify(key_of(did), signing_input(v, s), b64(s["value"])), v["type"]


SIGNER = {
    "TaskManifest": ("requesterDid", "requester"),
    "CapabilityToken": ("issuerDid", "issuer"),
    "ApprovalReceipt": ("approverDid", "owner"),
    "RevocationNotice": ("issuerDid", "issuer"),
    "UsageReceipt": ("workerDid", "worker"),
    "ExecutionAttestation": ("workerDid", "worker"),
    "Deliverable": ("workerDid", "worker"),
    "VerificationReport": ("requesterDid", "requester"),
    "SettlementReceipt": ("requesterDid", "requester"),
    "Envelope": ("from", "sender"),
    "Invite": ("issuerDid", "issuer"),
    "RelayAuth": ("did", "recipient"),
    "AuditBundle": ("exporterDid", "exporter"),
}


def check(v):
    if v.get("type") in SIGNER:
        member, role = SIGNER[v["type"]]
        signed(v, v["signature"], v[member], role)
    if v.get("type") == "TaskContract":
        check(v["manifest"])
        assert v["manifestDigest"] == digest(v["manifest"])
        dids = [v["manifest"]["requesterDid"], v["workerDid"]]
        for s, did, role in zip(v["signatures"], dids, ["requester", "worker"]):
            signed(v, s, did, role)


def chain(genesis, entries, objects):
    """Entries are pairs (entry, payload or None)."""
    prev, state = digest(genesis), None
    actors = dict(zip(["requester", "worker"], genesis["actors"]))
    for seq, (entry, payload) in enumerate(entries):
        assert (entry["seq"], entry["prev"], entry["fromState"]) == (seq, prev, state)
        assert entry["taskId"] == genesis["taskId"]
        author = entry["actorRole"]
        other = "worker" if author == "requester" else "requester"
        first, second = entry["signatures"]
        assert first["signedAt"] == entry["at"]
        signed(entry, first, actors[author], author)
        signed(entry, second, actors[other], other)
        if payload is not None:
            assert digest(payload) == entry["payloadDigest"]
            for name in payload:
                assert digest(objects[name]) == name
                check(objects[name])
        prev, state = digest(body(entry)), entry["toState"]
    return prev


def main():
    here = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent.parent / "vectors/acp"
    v = json.loads((here / "acp-vectors.v1.json").read_text())
    for case in v["signed"]:
        o, s = case["object"], case["object"]["signature"]
        assert jcs(body(o)) == case["bodyJcs"]
        assert digest(body(o)) == case["bodyDigest"] and digest(o) == case["objectDigest"]
        data = signing_input(o, s)
        assert hashlib.sha256(data).hexdigest() == case["signingInputSha256"]
        assert len(data) == case["signingInputLength"]
        check(o)
        broken = dict(o, nonce="BAAAAAAAAAAAAAAAAAAAAA")
        try:
            check(broken)
        except AssertionError:
            continue
        raise SystemExit("a changed object passed")
    invite = v["signed"][2]["object"]
    for uri in (v["inviteUri"].removeprefix("acp-invite:"), v["inviteUriAlt"].removeprefix("acp://invite?token=")):
        assert b64(uri).decode() == jcs(invite)
    assert b64(v["relayAuthToken"]).decode() == jcs(v["signed"][3]["object"])
    genesis = v["genesis"]["object"]
    assert jcs(genesis) == v["genesis"]["jcs"] and digest(genesis) == v["genesis"]["digest"]
    assert chain(genesis, [(e["entry"], None) for e in v["chain"]], {}) == v["head"] == v["trustAnchor"]["head"]
    check(v["hpke"]["envelope"])
    assert digest(v["hpke"]["envelope"]) == v["hpke"]["envelopeDigest"]
    header = {k: v["hpke"]["envelope"][k] for k in json.loads(v["hpke"]["aadJcs"])}
    assert len(header) == 9 and jcs(header) == v["hpke"]["aadJcs"]
    for output in v["quorum"]["outputs"]:
        assert digest(output) == v["quorum"]["digest"]
    print("acp-vectors.v1.json: ok")

    lines = (here / "acp-audit-settled.v1.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert all(jcs(row) == line for row, line in zip(rows, lines))
    objects = {row["digest"]: row["object"] for row in rows if row["kind"] == "object"}
    entries = [(row["entry"], row["payload"]) for row in rows if row["kind"] == "entry"]
    head = chain(rows[0]["genesis"], entries, objects)
    assert head == rows[-1]["digest"]
    print("acp-audit-settled.v1.jsonl: ok")

    bundle = json.loads((here / "acp-bundle-settled.v1.json").read_text())
    check(bundle)
    assert bundle["objects"] == objects and bundle["head"] == head and bundle["sealed"]
    assert [(e["entry"], e["payload"]) for e in bundle["entries"]] == entries
    print("acp-bundle-settled.v1.json: ok")


main()
