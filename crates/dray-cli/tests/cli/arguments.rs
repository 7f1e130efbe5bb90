//! Wrong arguments: exit code 2, a message that names the argument, nothing asked of the agent.

use crate::fake::Fake;

#[track_caller]
fn refused(args: &[&str], message: &str) {
    let fake = Fake::start();
    let ran = fake.run(args);
    assert_eq!(ran.code, 2, "{args:?}: {}", ran.err);
    assert!(ran.err.contains(message), "{args:?}: {}", ran.err);
    assert!(ran.out.is_empty());
    assert!(fake.seen().is_empty(), "{args:?} reached the agent");
}

#[test]
fn wrong_arguments_are_refused_here() {
    refused(&["migrte"], "migrate");
    refused(&["migrate", "--to", "hostb"], "--qmp");
    refused(&["migrate", "--qmp", "/q"], "--to");
    refused(&["migrate", "--qmp", "/q", "--image", "a", "--to", "b"], "cannot be used with");
    refused(&["migrate", "--qmp", "/q", "--to", "b", "--strategy", "magic"], "post-copy");
    refused(&["migrate", "--qmp", "/q", "--to", "b", "--bandwidth", "fast"], "800Mbit");
    refused(&["migrate", "--qmp", "/q", "--to", "b", "--max-downtime", "1h"], "300ms");
    let relative = ["migrate", "--qmp", "/q", "--to", "b", "--target-qmp", "in.qmp"];
    refused(&relative, "must be absolute");
    refused(&["migrate", "--image", "a", "--to", "b", "--name", "a"], "HERE=THERE");
    refused(&["migrate", "--image", "a", "--to", "b", "--target-qmp", "/t"], "cannot be used");
    let several = ["migrate", "--all", "--vm", "/q", "--to", "b"];
    refused(&several, "cannot be used");
    refused(&["migrate", "--vm", "/q=t", "--to", "b"], "must be absolute");
    refused(&["migrate", "--qmp", "/q", "--each", "--to", "b"], "cannot be used");
    refused(&["migrate", "--all", "--to", "b", "--jobs", "0"], "--jobs");
    refused(&["limit"], "<RATE>");
    refused(&["limit", "0Mbit"], "or none");
    refused(&["resize", "a", "huge"], "2GiB");
    refused(&["images", "add", "a"], "<PATH>");
    refused(&["images", "add", "a", "/p", "--growable", "--fixed"], "cannot be used");
    refused(&["status", "-q", "-v"], "cannot be used");
    refused(&["completions", "cobol"], "possible values");
}
