#![no_main]

#[path = "../acp.rs"]
mod acp;

libfuzzer_sys::fuzz_target!(|data: &[u8]| acp::acp_relay(data));
