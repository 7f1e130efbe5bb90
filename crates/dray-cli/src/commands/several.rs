//! `dray migrate` of several at once: which, and how many at a time.

use super::{absolute, path_at_target};
use crate::client::Client;
use dray_api::{
    ApiResult, Batch, ErrorKind, JOBS, Migrate, MigrationState, MigrationStatus, Refusal, Role,
    Status, Subject,
};
use dray_types::Why;
use std::path::PathBuf;

/// Which VMs and images, and how.
#[derive(clap::Args, Debug, Default)]
#[command(next_help_heading = "Several at once")]
pub struct SeveralArgs {
    /// A VM by its QMP socket, and that of the QEMU that waits for it at the target if `prepare`
    /// was not told (repeat for several)
    #[arg(long = "vm", value_name = "SOCKET[=THERE]", value_parser = vm)]
    vms: Vec<Vm>,
    /// All migrations that are prepared for this target
    #[arg(long, conflicts_with_all = ["vms", "images", "qmp"])]
    all: bool,
    /// Each --image is a migration of its own
    #[arg(long, requires = "images", conflicts_with = "qmp")]
    each: bool,
    /// Number of migrations that run at the same time [default: 2]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    jobs: Option<u16>,
    /// Run them in the given order [default: first the one that `dray plan` predicts to be shortest]
    #[arg(long)]
    in_order: bool,
}

/// A VM as it is typed.
#[derive(Clone, PartialEq, Debug)]
struct Vm {
    qmp: PathBuf,
    target_qmp: Option<PathBuf>,
}

fn vm(text: &str) -> Result<Vm, Why> {
    let (here, there) = match text.split_once('=') {
        Some((here, there)) => (here, Some(path_at_target(there)?)),
        None => (text, None),
    };
    if here.is_empty() {
        return Err("write it as SOCKET or SOCKET=THERE".into());
    }
    Ok(Vm { qmp: here.into(), target_qmp: there })
}

fn invalid(why: &str, hint: &str) -> Refusal {
    Refusal::new(ErrorKind::Invalid, "cannot tell what to move", why).hint(hint)
}

impl SeveralArgs {
    /// Whether one command begins several migrations.
    pub fn wanted(&self) -> bool {
        self.all || self.each || !self.vms.is_empty()
    }

    /// Refuses what only makes sense with several.
    pub fn refuse_leftovers(&self) -> ApiResult<()> {
        if self.jobs.is_none() && !self.in_order {
            return Ok(());
        }
        let why = "--jobs and --in-order are for several migrations, and this is one";
        Err(invalid(why, "name several with --vm, --all, or --each and --image"))
    }

    /// Each migration as `like` is, with what `self` and `images` name.
    pub async fn batch(
        self,
        images: Vec<String>,
        like: Migrate,
        client: &Client,
    ) -> ApiResult<Batch> {
        if !images.is_empty() && !self.each {
            let why = "the images may be one migration, or one each";
            return Err(invalid(why, "with --vm, images need --each"));
        }
        let one = |subject, target_qmp| Migrate {
            subject,
            target_qmp,
            bandwidth: None,
            detach: false,
            ..like.clone()
        };
        let mut moves = Vec::new();
        // What a VM has only its agent knows.
        let images_alone = self.vms.is_empty() && !self.all;
        for vm in self.vms {
            moves.push(one(Subject::Vm { qmp: absolute(&vm.qmp)? }, vm.target_qmp));
        }
        let mut unused = like.names.clone();
        for name in images {
            let mut moved = one(Subject::Images { names: vec![name.clone()] }, None);
            moved.names.retain(|here, _| *here == name);
            unused.remove(&name);
            moves.push(moved);
        }
        if let Some(here) = unused.keys().next().filter(|_| images_alone) {
            let why = format!("no image of this move is called '{here}'");
            return Err(invalid(&why, "--name HERE=THERE takes the name of an image on this host"));
        }
        if self.all {
            for prepared in prepared(client, &like.to).await? {
                let Some(subject) = prepared.subject else { continue };
                let prepared = Some(prepared.migration.into());
                moves.push(Migrate { prepared, ..one(subject, None) });
            }
        }
        Ok(Batch {
            moves,
            jobs: self.jobs.map_or(JOBS, usize::from),
            budget: like.bandwidth,
            in_order: self.in_order,
            detach: like.detach,
        })
    }
}

/// What waits here for being moved to `host`, the oldest first.
async fn prepared(client: &Client, host: &str) -> ApiResult<Vec<MigrationStatus>> {
    let mut all = client.call(Status::default()).await?;
    all.retain(|one| {
        one.state == MigrationState::Prepared && one.role == Role::Source && one.peer == host
    });
    all.reverse();
    if all.is_empty() {
        let why = format!("nothing is prepared for {host}");
        return Err(Refusal::new(ErrorKind::NotFound, "cannot move everything", why).hint(
            "`dray prepare --qmp SOCKET --to HOST --target-qmp THERE` prepares a VM for --all",
        ));
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vm_is_a_socket_and_perhaps_another_there() {
        let alone = Vm { qmp: "a".into(), target_qmp: None };
        assert_eq!(vm("a"), Ok(alone.clone()));
        assert_eq!(vm("a=/b"), Ok(Vm { target_qmp: Some("/b".into()), ..alone }));
        for wrong in ["", "=", "=/b", "a=", "a=b"] {
            assert!(vm(wrong).is_err(), "{wrong}");
        }
    }
}
