//! `dray migrate`: from what was asked to a migration that runs.

use super::selection::{Plan, layer_plans};
use crate::agent::Agent;
use crate::api::{Answers, Events};
use dray_api::{
    ApiResult, Chain, ErrorKind, Event, Migrate, Migrated, MigrationState, Prepare, Refusal,
    ReleaseAtEnd, Started, Subject, TargetFormat, Watch,
};
use dray_files::unix_ms;
use dray_host::folder::intent::{
    Conditions, GuestFacts, Options, Settings, SourceImage, SourceIntent,
};
use dray_host::refusals::io_error;
use dray_migrate::source::SourceSlot;
use dray_migrate::{forecast, links};
use dray_net::{NetError, NetErrorKind};
use dray_types::{BitRate, Choice};
use dray_vm::picture::{LayerLocation, Picture};
use dray_wire::request::Request;
use std::sync::Arc;
use std::time::Duration;
use tokio::task::block_in_place;

/// Downtime to aim for when the operator names none, in milliseconds: QEMU's own default.
pub(super) const MAX_DOWNTIME_MS: u64 = 300;

/// What to do when nothing fit waits at the target.
const START_WAITING: &str = "start the waiting QEMU with the arguments that `dray prepare` prints, and give `dray \
                             migrate` again: what was prepared stays";

/// How a migration that one command begins with others is begun.
pub(crate) struct Together<'a> {
    /// What it may reckon with of the bandwidth that all of them share.
    pub share: Option<BitRate>,
    /// Told before it begins: what happens then outlives this process.
    pub note: &'a (dyn Fn(&SourceSlot) -> ApiResult<()> + Sync),
}

/// QEMU measures a guest's memory for a second.
const MEASURE: Duration = Duration::from_secs(3);

/// What becomes of chains: what was prepared decides, and a command may not say otherwise.
fn chain_of(what: &str, command: &Migrate, slot: Option<&SourceSlot>) -> ApiResult<Chain> {
    let Some(slot) = slot else { return Ok(command.chain.unwrap_or_default()) };
    let flat = slot.intent().images.iter().any(|image| !image.chain.is_empty());
    if flat && command.chain == Some(Chain::Keep) {
        return Err(other_chain(what, "it was prepared with --chain flatten"));
    }
    Ok(if flat { Chain::Flatten } else { Chain::Keep })
}

/// A disk that was prepared with its chain cannot be flattened now.
fn refuse_unflattened(
    what: &str,
    command: &Migrate,
    chain: Chain,
    picture: Option<&Picture>,
) -> ApiResult<()> {
    let wanted = command.chain == Some(Chain::Flatten) && chain == Chain::Keep;
    let format = |picture: &Picture| picture.layers().any(|layer| layer.plan.format != "raw");
    if wanted && picture.is_some_and(format) {
        return Err(other_chain(what, "it was prepared without --chain flatten"));
    }
    Ok(())
}

/// Whether the target makes a qcow2 of one of its images.
fn wants_qcow2(slot: &SourceSlot) -> bool {
    slot.intent().images.iter().any(|image| image.qcow2)
}

/// A disk that becomes a qcow2 does not stay with dray.
fn refuse_kept(what: &str, command: &Migrate, slot: &SourceSlot) -> ApiResult<()> {
    if command.release != ReleaseAtEnd::Never || !wants_qcow2(slot) {
        return Ok(());
    }
    let why = "it was prepared with --target-format qcow2, and a qcow2 cannot stay on dray";
    Err(Refusal::new(ErrorKind::Invalid, what, why)
        .hint("leave --release out, or prepare again without --target-format"))
}

fn other_chain(what: &str, why: &str) -> Refusal {
    Refusal::new(ErrorKind::Conflict, what, why)
        .hint("`dray cancel` the prepared migration and prepare again: the target's disk differs")
}

/// Refuses what was prepared when a file that nobody may write is not as it was then: its length and what the target has
/// of it are of that time.
fn check_unwritten(what: &str, intent: &SourceIntent) -> ApiResult<()> {
    intent.images.iter().try_for_each(SourceImage::check_unwritten).map_err(|why| {
        let why = format!("since it was prepared, {why}");
        Refusal::new(ErrorKind::Conflict, what, why)
            .hint("`dray cancel` the prepared migration and prepare again")
    })
}

/// Of those who want a prepared migration one gets it.
pub(super) fn take(what: &str, slot: &SourceSlot) -> ApiResult<()> {
    slot.board.take(MigrationState::Running).ok_or_else(|| {
        let why = "another command has just begun or cancelled it";
        Refusal::new(ErrorKind::Conflict, what, why).hint("see `dray status`")
    })
}

/// How much of a VM's memory there is, and how fast the guest writes it; `measure` takes the time to
/// measure that if QEMU has not done so before.
pub(super) async fn guest_memory(picture: Option<&Picture>, measure: bool) -> (u64, u64) {
    let bytes = memory(picture).await;
    let Some(picture) = picture.filter(|_| bytes > 0) else { return (bytes, 0) };
    let patience = if measure { MEASURE } else { Duration::ZERO };
    (bytes, dray_qemu::status::memory_dirty_rate(picture.qmp(), patience).await.unwrap_or(0))
}

/// Bytes of a VM's memory; none when its QEMU does not tell, or without a VM.
async fn memory(picture: Option<&Picture>) -> u64 {
    let Some(picture) = picture else { return 0 };
    let nothing = serde_json::json!({});
    let told = picture.qmp().execute("query-memory-size-summary", nothing).await;
    told.ok().and_then(|told| told["base-memory"].as_u64()).unwrap_or(0)
}

impl Answers<Migrate> for Arc<Agent> {
    async fn answer(&self, command: Migrate, events: Events) -> ApiResult<Migrated> {
        let detach = command.detach;
        self.check(&command)?;
        let unseeded = self.seed_migration(&command, &events).await?;
        let started = self.migrate(command, None).await?;
        if let Some(notice) = unseeded {
            let _ = events.send(notice).await;
        }
        if detach {
            return Ok(Migrated::Started(started));
        }
        let watch = Watch { migration: Some(started.migration.into()) };
        // A client that has gone is noticed by the connection; the migration goes on.
        let _ = events.send(Event::Started(started)).await;
        Ok(Migrated::Ended(Box::new(self.answer(watch, events).await?)))
    }
}

impl Agent {
    /// What can be known of the guest and the link; a target that cannot be reached now is told of
    /// later. Only auto, which decides by it, waits until the guest's memory was measured.
    async fn conditions(
        &self,
        command: &Migrate,
        picture: Option<&Picture>,
        share: Option<BitRate>,
    ) -> Conditions {
        let Ok(settings) = self.session_settings(&command.to) else { return Conditions::default() };
        let auto = command.strategy.traits().choice == Choice::Planned;
        let (memory, memory_dirty) = guest_memory(picture, auto).await;
        let rtt = forecast::round_trip(&settings.address).await.unwrap_or(0.0);
        let link = links::rate(&self.store.links(), &command.to);
        let share = share.map(|share| share.bytes_per_second);
        let link = [link, share].into_iter().flatten().min();
        Conditions { rtt, memory, memory_dirty, link }
    }

    /// What can be said of a command without looking at anything.
    pub(super) fn check(&self, command: &Migrate) -> ApiResult<()> {
        let invalid = |why: &str, hint: &str| {
            let what = format!("cannot migrate to {}", command.to);
            Err(Refusal::new(ErrorKind::Invalid, what, why).hint(hint))
        };
        let vm = matches!(command.subject, Subject::Vm { .. });
        if !vm && command.target_qmp.is_some() {
            return invalid("images move without a QEMU at the target", "see --target-qmp");
        }
        dray_api::tuning::check(&command.tuning, command.strategy)?;
        if command.deadline_ms.is_some() && command.strategy.traits().choice != Choice::Planned {
            return invalid("only auto chooses blocks by a deadline", "use --strategy auto");
        }
        Ok(())
    }

    /// Begins a migration, alone or together with others.
    pub(crate) async fn migrate(
        self: &Arc<Self>,
        mut command: Migrate,
        together: Option<Together<'_>>,
    ) -> ApiResult<Started> {
        let what = format!("cannot migrate to {}", command.to);
        self.check(&command)?;
        let (slot, plan, picture) = self.find_or_prepare(&what, &command).await?;
        let told = slot.intent().vm.and_then(|vm| vm.target_qmp);
        command.target_qmp = command.target_qmp.or(told);
        if picture.is_some() && command.target_qmp.is_none() {
            let why = "the QMP socket of the waiting QEMU at the target is needed";
            return Err(Refusal::new(ErrorKind::Invalid, what, why)
                .hint("name it with --target-qmp, here or when you prepare"));
        }
        refuse_kept(&what, &command, &slot)?;
        take(&what, &slot)?;
        let share = together.as_ref().and_then(|together| together.share);
        let noted = together.map_or(Ok(()), |together| (together.note)(&slot));
        let begun = match noted {
            Ok(()) => self.begin(&what, &slot, &command, &plan, picture.as_ref(), share).await,
            Err(why) => Err(why),
        };
        if begun.is_err() {
            slot.pacer.leave();
            slot.board.change(|shown| shown.state = MigrationState::Prepared);
        }
        begun
    }

    /// Begins what was prepared; nobody else can cancel or begin it.
    async fn begin(
        self: &Arc<Self>,
        what: &str,
        slot: &Arc<SourceSlot>,
        command: &Migrate,
        plan: &Plan,
        picture: Option<&Picture>,
        share: Option<BitRate>,
    ) -> ApiResult<Started> {
        let vm = picture.is_some();
        let mut intent = slot.intent();
        intent.started_unix_ms = unix_ms();
        if let (Some(picture), Some(qmp)) = (picture, &command.target_qmp) {
            let layers = layer_plans(picture, plan)?;
            let facts = GuestFacts {
                name: slot.board.read().vm,
                qmp: qmp.clone(),
                layers,
                running: picture.look.status.goes_on(),
            };
            self.refuse_unawaited(&intent, &facts).await?;
            self.adopt_for(&mut intent, slot, picture, command, facts).await?;
        }
        let resident = intent.adopted.is_empty();
        let conditions = self.conditions(command, picture, share).await;
        intent.options = Some(Options {
            strategy: command.strategy,
            order: command.order,
            tuning: command.tuning.clone(),
            bandwidth: command.bandwidth,
            max_downtime_ms: command.max_downtime_ms.unwrap_or(MAX_DOWNTIME_MS),
            deadline_ms: command.deadline_ms,
            conditions,
            settings: Settings {
                verify: command.verify,
                release: match command.release {
                    _ if wants_qcow2(slot) => true,
                    ReleaseAtEnd::Always => true,
                    ReleaseAtEnd::Never => false,
                    ReleaseAtEnd::AsBefore => vm && !resident,
                },
            },
            remove_replica: command.remove_replica,
            no_reuse: command.no_reuse,
        });
        self.start(what, slot, intent)
    }

    /// Refuses a VM that nothing waits for at the target: what was prepared stays. The migration looks again, and
    /// tells why a target does not answer.
    async fn refuse_unawaited(&self, intent: &SourceIntent, facts: &GuestFacts) -> ApiResult<()> {
        let (migration, peer) = (intent.migration, &intent.peer);
        let qmp = facts.qmp.to_string_lossy().into_owned();
        let request = Request::Waits { migration, qmp, layers: facts.layers.clone() };
        match self.ask(peer, &request).await {
            Err(NetError { kind: NetErrorKind::Refused(kind), what: why, .. })
                if matches!(kind, ErrorKind::Hypervisor | ErrorKind::Denied) =>
            {
                let what = format!("cannot migrate to {peer}");
                Err(Refusal::new(kind, what, why).hint(START_WAITING))
            }
            _ => Ok(()),
        }
    }

    /// Makes the intent durable, binds the images to the migration and begins.
    pub(super) fn start(
        self: &Arc<Self>,
        what: &str,
        slot: &Arc<SourceSlot>,
        intent: SourceIntent,
    ) -> ApiResult<Started> {
        let migration = intent.migration;
        // A backup looks for the migration after it has taken the image, and this the other way
        // round: one of the two sees the other.
        let names: Vec<_> = intent.images.iter().map(|image| image.name.clone()).collect();
        let check = || names.iter().try_for_each(|name| self.refuse_during_backup(what, name));
        block_in_place(|| slot.begin(what, &self.registry, intent.clone(), check))?;
        tokio::spawn(Arc::clone(self).drive(Arc::clone(slot), intent, true));
        Ok(Started { migration })
    }

    /// The prepared migration that is meant, or a new one for images that need no QEMU.
    async fn find_or_prepare(
        self: &Arc<Self>,
        what: &str,
        command: &Migrate,
    ) -> ApiResult<(Arc<SourceSlot>, Plan, Option<Picture>)> {
        let slot = self.prepared(command)?;
        let chain = chain_of(what, command, slot.as_deref())?;
        let prepare = Prepare {
            subject: command.subject.clone(),
            to: command.to.clone(),
            pool: command.pool.clone(),
            prefix: None,
            names: command.names.clone(),
            target_qmp: None,
            chain,
            target_format: match slot.as_deref().is_some_and(wants_qcow2) {
                true => TargetFormat::Qcow2,
                false => TargetFormat::Raw,
            },
            no_backups: true,
            owner: command.owner.clone(),
            command_line: false,
            replace: false,
        };
        if let Some(slot) = slot {
            let (_, plan, picture) = self.plan(&prepare).await?;
            self.refuse_without_vm(&command.subject)?;
            refuse_unflattened(what, command, chain, picture.as_ref())?;
            let same = plan.images.iter().map(|image| &image.path);
            if !same.eq(slot.intent().images.iter().map(|image| &image.path)) {
                let why = "the images of the vm are not those that were prepared";
                return Err(Refusal::new(ErrorKind::Conflict, what, why)
                    .hint("`dray cancel` the prepared migration and prepare again"));
            }
            block_in_place(|| check_unwritten(what, &slot.intent()))?;
            return Ok((slot, plan, picture));
        }
        if let Subject::Vm { qmp } = &command.subject {
            // A name that was mistyped has nothing prepared either.
            std::fs::metadata(qmp).map_err(|why| {
                Refusal::new(ErrorKind::NotFound, what, format!("{}: {why}", qmp.display()))
                    .hint("name the QMP socket of the running vm")
            })?;
            let why = format!("nothing is prepared for it on {}", command.to);
            return Err(Refusal::new(ErrorKind::NotFound, what, why)
                .hint("give `dray prepare` first: it prints the arguments for the waiting QEMU"));
        }
        let (intent, plan, picture) = self.plan(&prepare).await?;
        self.refuse_without_vm(&command.subject)?;
        let (pool, owner) = (command.pool.as_deref(), command.owner.as_deref());
        let (slot, _) = self.prepare_at_target(intent, &plan, (pool, owner)).await?;
        Ok((slot, plan, picture))
    }

    pub(super) fn prepared(&self, command: &Migrate) -> ApiResult<Option<Arc<SourceSlot>>> {
        if let Some(named) = &command.prepared {
            let waiting = self.all_prepared();
            let id = named.resolve(waiting.iter().map(|slot| slot.board.migration))?;
            return Ok(self.sources.get(id));
        }
        Ok(self.prepared_for(&command.subject, &command.to))
    }

    /// Splices the VM's own disks under dray, and writes down what its QEMU at the target must
    /// have. If one cannot be adopted, those before it go back.
    async fn adopt_for(
        self: &Arc<Self>,
        intent: &mut SourceIntent,
        slot: &Arc<SourceSlot>,
        picture: &Picture,
        command: &Migrate,
        facts: GuestFacts,
    ) -> ApiResult<()> {
        // The others are looked at when they are adopted.
        picture.check_nodes(|layer| layer.plan.read_only || layer.plan.depth > 0).await?;
        for disk in &picture.disks {
            let Some(layer) = disk.first() else { continue };
            let LayerLocation::Local(path) = &layer.place else { continue };
            if layer.plan.read_only {
                continue;
            }
            let path = dray_host::registry::real_path(path)
                .map_err(|why| io_error("cannot adopt", why))?;
            let image = intent.images.iter().find(|image| image.path == path);
            let id = image.map(|image| image.offer.id);
            let adopted = if layer.chain.is_empty() {
                self.adopt_layer(picture, layer, command.drop_bitmaps, id).await
            } else {
                self.freeze_disk(picture, layer, command.drop_bitmaps, id).await
            };
            match adopted {
                Ok(disk) => {
                    if let Some(image) = intent.images.iter_mut().find(|i| i.path == path) {
                        image.name.clone_from(&disk.image);
                    }
                    intent.adopted.push(disk.image);
                }
                Err(why) => {
                    slot.set_adopted(&intent.adopted);
                    self.unadopt(slot, Some(&*picture.vm)).await;
                    return Err(why);
                }
            }
        }
        if let Some(vm) = &mut intent.vm {
            vm.qemu.clone_from(&picture.look.process);
            vm.facts = Some(facts);
        }
        Ok(())
    }
}
