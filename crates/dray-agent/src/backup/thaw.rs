//! Guests that may be frozen since a backup, and are asked to thaw until they have.

use crate::agent::Agent;
use std::io;
use std::path::Path;
use std::sync::{Arc, Weak};
use std::thread::{Builder, sleep};
use std::time::Duration;

/// Pause between two looks for guests that are still to thaw.
const LOOK: Duration = Duration::from_secs(5);

/// Thaws the guests that were left over, in a thread of its own.
///
/// # Errors
/// When no thread can be made.
pub fn keep(agent: &Arc<Agent>) -> io::Result<()> {
    let agent = Arc::downgrade(agent);
    let work = move || {
        while look(&agent) {
            sleep(LOOK);
        }
    };
    Builder::new().name("dray-thaw".to_owned()).spawn(work).map(drop)
}

/// Refuses a socket that leads elsewhere than when it was noted: whoever may write to its folder is not trusted.
fn is_still(agent: &Agent, socket: &Path) -> io::Result<()> {
    if !socket.try_exists()? {
        return Ok(());
    }
    match agent.config.qmp_socket(socket) {
        Ok(now) if now == socket => Ok(()),
        Ok(now) => Err(io::Error::other(format!("it leads to {} now", now.display()))),
        Err(why) => Err(io::Error::other(why.to_string())),
    }
}

/// One look; whether there is an agent.
fn look(agent: &Weak<Agent>) -> bool {
    let Some(agent) = agent.upgrade() else { return false };
    agent.troubles.settle(
        "frozen",
        "the agent does not know whether a backup has left guests frozen",
        agent.frozen.unread(),
        "check the guests that are backed up with --fsfreeze; `virsh domfsthaw` thaws one",
    );
    for socket in agent.frozen.left() {
        let shown = socket.display();
        let thawed = is_still(&agent, &socket).and_then(|()| agent.frozen.thaw_left(&socket));
        agent.troubles.settle(
            &format!("frozen.{shown}"),
            &format!("a backup may have left the guest frozen whose agent listens on {shown}"),
            thawed.err(),
            "dray keeps trying; `virsh domfsthaw` may be quicker, and a look at the guest shows the cause",
        );
    }
    true
}
