//! The planner: everything of the protocol that needs no file, clock or process. Texts and facts in,
//! texts, verdicts and reports out.

pub mod adapter;
pub mod daily;
pub mod engine;
pub mod index;
pub mod json;
pub mod marker;
pub mod name;
pub mod page;
pub mod payload;
pub mod report;
pub mod search;
pub mod state;
pub mod text;
