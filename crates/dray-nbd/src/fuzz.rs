//! Whatever bytes a client sends: no panic, no hang, and no answer outside the protocol.
