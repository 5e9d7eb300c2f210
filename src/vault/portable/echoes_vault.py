"""Stand-in: names the versions only."""
ENGINE_VERSION = "1.1.1"
PROTOCOL_VERSION = "1.0.0"
