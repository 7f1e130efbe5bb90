//! Who may ask the agent for what.

/// What somebody on this host may have the agent do. Each may do what those before it may.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum AccessLevel {
    /// Sees what there is and what happens, and changes nothing.
    Reader,
    /// Moves, adopts, backs up: with the pools, repositories and QMP sockets that the configuration
    /// names.
    Operator,
    /// Also names repositories, keys and sockets that the configuration does not: the agent opens
    /// them with its own rights. Root, and whoever the agent runs as.
    Admin,
}
