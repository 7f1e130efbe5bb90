//! One question, one answer.

use crate::lab::{Lab, serve};
use dray_net::requests::{self, RequestHandler, ask};
use dray_net::{ListenSettings, NetErrorKind};
use dray_types::{ErrorKind, MigrationId, Refusal};
use dray_wire::request::{Reply, Request};
use std::sync::Arc;
use std::time::Duration;

struct Desk;

fn identity(agent: &str) -> Reply {
    let pools = vec![("ssd".to_owned(), Some(5))];
    Reply::Identity { agent: agent.to_owned(), pools, unix_ms: 1, certificate_days: Some(9) }
}

impl RequestHandler for Desk {
    async fn answer(&self, peer: &str, request: Request) -> Reply {
        match request {
            Request::Identify => identity(peer),
            Request::Forget { migration: MigrationId(1) } => std::future::pending().await,
            _ => {
                let why = Refusal::new(ErrorKind::NoSpace, "cannot", "pool 'ssd' has 3 GiB free");
                Reply::Refused(why.hint("free some space"))
            }
        }
    }
}

#[tokio::test]
async fn questions_are_answered_refused_or_time_out() {
    let lab = Lab::new();
    let desk = Arc::new(Desk);
    let address = serve(&lab.hostb, ListenSettings::default(), move |incoming| {
        let desk = Arc::clone(&desk);
        async move {
            let _ = requests::serve(incoming, desk.as_ref()).await;
        }
    })
    .await
    .to_string();
    let ask = async |request: Request| {
        ask(&lab.hosta, "hostb", &address, &request, Duration::from_millis(500)).await
    };
    let reply = ask(Request::Identify).await.unwrap();
    assert_eq!(reply, identity("hosta"));
    let error = ask(Request::Forget { migration: MigrationId(2) }).await.unwrap_err();
    assert_eq!(error.kind, NetErrorKind::Refused(ErrorKind::NoSpace));
    assert_eq!(error.to_string(), "hostb refuses: pool 'ssd' has 3 GiB free; free some space");
    let error = ask(Request::Forget { migration: MigrationId(1) }).await.unwrap_err();
    assert_eq!(error.kind, NetErrorKind::Timeout, "{error}");
}
