//! Published test suites of what the protocol is built on, through the functions that it calls.
//! Where ours differs by design, the difference stands in a list with its reason; one that is
//! listed and gone is a failure too.

mod crypto;
mod dsse;
mod jcs;
mod schema;
