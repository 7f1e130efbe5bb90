//! Without a session: what is asked of the source, what follows from its answer, and what is shown
//! meanwhile. A promise is dropped only on the source's word that nothing was handed over (I1).

use super::{TargetLoop, TargetSlot};
use dray_api::{ErrorKind, MigrationState, Refusal};
use dray_files::unix_ms;
use dray_host::folder::standing::Unserved;
use dray_host::migration::fate::is_unwanted;
use dray_net::NetError;
use dray_types::ImageId;
use dray_wire::request::Fate;
use dray_wire::{Envelope, ToTarget};
use parking_lot::MutexGuard;
use std::time::Instant;

/// Why a source takes no part in a migration any more.
const CLAIMED: &str = "an image of it was claimed there: the migration is void";
/// What is said of images that were handed back.
pub(super) const BACK: &str = "the images were handed back";
/// Why the blocks that are missing do not come.
const LET_GO: &str = "it does not know the migration any more: it was cancelled there";

/// Who has no session asks its source.
#[derive(Clone, Debug)]
pub struct Question {
    /// How many sessions there were: an answer means nothing once there was another one.
    pub sessions: u64,
    /// Since when there is none.
    pub since: Instant,
    /// The images that a guest may write.
    pub images: Vec<ImageId>,
    /// They are this host's, and all of them is here: it waits for the end alone.
    pub complete: bool,
    /// They are this host's, which serves them and lacks blocks. The answer is only shown.
    pub serves: bool,
}

impl TargetSlot {
    /// What is to be asked of the source, if it is away while this host does not own the images, or has all of
    /// them and waits for the end.
    pub fn question(&self) -> Option<Question> {
        self.any_question().filter(|question| !question.serves)
    }

    /// The same, also while this host serves the images and waits for blocks of them.
    pub fn any_question(&self) -> Option<Question> {
        self.lock_question().clone()
    }

    /// Why the source takes no part in a migration any more whose images this host serves, and what an operator
    /// can do; none as long as it may come back.
    pub fn left_by_source(&self) -> Option<Refusal> {
        let shown = self.board.read().error?;
        (self.is_exposed() && shown.what == waits_for(&self.intent().peer)).then_some(shown)
    }

    fn lock_question(&self) -> MutexGuard<'_, Option<Question>> {
        self.question.lock()
    }

    /// Prepared once more by its source, which may take up what is here.
    pub fn prepared_again(&self) {
        self.board.change(|shown| {
            if shown.state == MigrationState::Interrupted {
                shown.state = MigrationState::Prepared;
                shown.waiting_since = Some(unix_ms());
            }
        });
    }
}

impl TargetLoop {
    /// What is shown of a loop that opens.
    pub(super) fn show_opened(&mut self) {
        let prepared = !self.engine.has_begun() && !self.engine.is_over();
        if prepared {
            let since = self.slot.intent().started_unix_ms;
            self.slot.board.change(|shown| {
                shown.state = MigrationState::Prepared;
                shown.waiting_since = Some(since);
            });
        }
        self.ask_if_alone();
        self.show_alone();
    }

    /// Notes whether the source has to be asked.
    pub(super) fn ask_if_alone(&self) {
        let mut question = self.slot.lock_question();
        let (complete, fenced) = (self.engine.is_complete(), self.engine.has_handed_back());
        let serves = self.engine.owns() && !complete;
        let over = self.engine.is_over() && !complete && !fenced;
        if self.session.is_some() || over {
            *question = None;
        } else if question.as_ref().is_none_or(|question| question.serves != serves) {
            let images = self.slot.intent().images;
            let written = images.iter().filter(|image| !image.offer.read_only);
            *question = Some(Question {
                sessions: self.sessions,
                since: Instant::now(),
                images: written.map(|image| image.offer.id).collect(),
                complete,
                serves,
            });
        }
    }

    /// The loop ends: nothing depends on its source any more.
    pub(super) fn ask_nothing(&self) {
        *self.slot.lock_question() = None;
    }

    fn has_promised(&self) -> bool {
        self.engine.phase() == dray_engine::Phase::Handover
    }

    /// What this host has done with the images, as long as it does not own them.
    fn unserved(&self) -> Unserved {
        match self.engine.has_handed_back() {
            true => Unserved::HandedBack,
            false if self.has_promised() => Unserved::Promised,
            false => Unserved::Received,
        }
    }

    /// A promise waits for its source from now on.
    pub(super) fn show_alone(&self) {
        if self.has_promised() {
            self.slot.board.change(|shown| {
                shown.waiting_since.get_or_insert_with(unix_ms);
            });
        }
    }

    /// The source is there.
    pub(super) fn show_met(&self) {
        let prepared = self.slot.board.read().state == MigrationState::Prepared;
        let what = self.waits();
        self.slot.board.change(|shown| {
            shown.waiting_since = shown.waiting_since.filter(|_| prepared);
            shown.error.take_if(|error| error.what == what);
        });
    }

    /// The source has said what becomes of the migration, or why it does not say. False when the loop shall
    /// end.
    pub(super) fn heard_fate(&mut self, sessions: u64, told: Result<Fate, NetError>) -> bool {
        // Whoever has come since knows better.
        if sessions != self.sessions || self.session.is_some() {
            return true;
        }
        if self.engine.owns() {
            self.owner_heard_fate(&told);
            return true;
        }
        match told {
            Ok(fate) if is_unwanted(fate, self.engine.has_begun()) => return !self.forget(),
            Ok(Fate::Live | Fate::HandedOver) => self.show_met(),
            Ok(Fate::Abandoned) => self.given_up(),
            Ok(Fate::Never | Fate::Unknown { .. }) => {
                self.show_why("it does not know the migration")
            }
            Ok(Fate::Claimed) => self.show_why(CLAIMED),
            Err(why) => self.show_why(&why.to_string()),
        }
        true
    }

    /// Of the two the source forgets last. One that has forgotten before it has said good-bye was told to, and neither
    /// compares nor says good-bye any more; nothing here depends on it, as all of the images is here. It changes
    /// nothing about who owns them.
    fn owner_heard_fate(&mut self, told: &Result<Fate, NetError>) {
        if !self.engine.is_complete() {
            match told {
                Ok(Fate::Claimed) => self.show_why(CLAIMED),
                // It was let go there, by an operator: what is missing here does not come any more.
                Ok(Fate::Never | Fate::Unknown { .. }) => self.show_why(LET_GO),
                Ok(Fate::Live | Fate::HandedOver | Fate::Abandoned) => self.show_met(),
                // It is away, as is shown already.
                Err(_) => {}
            }
        }
        let forgotten = matches!(told, Ok(Fate::Unknown { owned: false }));
        if !forgotten || !self.engine.is_complete() || !self.held.is_empty() {
            return;
        }
        match self.images.any_bound() {
            true => self.release_uncompared(),
            false => self.part(),
        }
    }

    /// As if the source had said so in a session.
    fn given_up(&mut self) {
        let shown = self.slot.board.read().state;
        if self.has_promised() || shown != MigrationState::Interrupted {
            let (epoch, attempt) = (self.engine.epoch(), self.engine.attempt());
            let body = ToTarget::Abandon { discard: false };
            self.step(dray_engine::TargetEvent::Message(Envelope { epoch, attempt, body }));
        }
        self.slot.board.change(|shown| shown.waiting_since = None);
        self.show_met();
    }

    /// The operator of this host takes back what its source cannot be asked about, and of which none was promised, or
    /// what was handed back, where an image of it was `claimed` at the source.
    ///
    /// # Errors
    /// What this host has done with the images; of what was only received: it cannot be removed at the moment.
    pub(super) fn take_back(&mut self, claimed: bool) -> Result<(), Unserved> {
        let useless = claimed && self.engine.has_handed_back();
        let may = self.session.is_none() && (useless || self.has_no_promise());
        if may && self.forget() { Ok(()) } else { Err(self.unserved()) }
    }

    /// What becomes of images that were handed back.
    pub(super) fn until_taken(&self) -> String {
        let intent = self.slot.intent();
        let image = intent.images.iter().find(|image| !image.offer.read_only);
        let (peer, name) = (&intent.peer, image.map_or("IMAGE", |image| image.name_here()));
        format!(
            "this host keeps its copy until {peer} has taken the images; if {peer} is lost: `dray \
             claim {name} --source-is-fenced` on this host"
        )
    }

    fn waits(&self) -> String {
        waits_for(&self.slot.intent().peer)
    }

    /// Why the source does not say what becomes of it, and what an operator can do.
    fn show_why(&self, why: &str) {
        let intent = self.slot.intent();
        let (peer, id, what) = (&intent.peer, intent.migration, self.waits());
        let image = intent.images.iter().find(|image| !image.offer.read_only);
        let name = image.map_or("IMAGE", |image| image.name_here());
        let claim = format!("`dray claim {name} --source-is-fenced` on this host");
        let hint = match self.unserved() {
            _ if self.engine.owns() => format!(
                "{peer} sends no more blocks: {claim} ends the migration and says which blocks are \
                 lost; after that, give `dray images remove {name}` if you want to keep the image \
                 on {peer}"
            ),
            Unserved::Promised => format!(
                "this host has promised to serve it, and waits until {peer} says whether the \
                 handover has happened; if {peer} is lost: {claim}"
            ),
            Unserved::HandedBack if why == CLAIMED => format!(
                "this host has handed the images back: `dray cancel {id}` on this host removes its \
                 copies, once {peer} serves all of them"
            ),
            Unserved::HandedBack => self.until_taken(),
            Unserved::Received => format!(
                "if {peer} is lost, `dray cancel {id}` on this host ends it; the agent removes it \
                 when {peer} has not asked for it for 24 hours"
            ),
        };
        let error = Refusal::new(ErrorKind::Peer, what.clone(), why).hint(hint);
        self.slot.board.change(|shown| {
            let known = shown.error.as_ref().map(|known| known.what.as_str());
            if known.is_none_or(|known| known == what || known == BACK) {
                shown.error = Some(error);
            }
        });
    }
}

/// What a target is shown to do whose source does not say what becomes of the migration.
fn waits_for(peer: &str) -> String {
    format!("waits for {peer}")
}
