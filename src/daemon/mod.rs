//! Composition: configuration, then store, node, services and surfaces.

pub mod config;
