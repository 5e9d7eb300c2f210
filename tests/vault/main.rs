//! The vault, from outside: golden cases, races, crashes and hostile files, against the built binary.
