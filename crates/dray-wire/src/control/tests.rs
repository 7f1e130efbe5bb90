use super::*;
use crate::error::WireError;
use dray_types::ErrorKind;
use dray_types::ids::MAX_COUNT;
use proptest::prelude::*;

fn prepare() -> Envelope<ToTarget> {
    let missing = [BlockRange::new(3, 9), BlockRange::new(100_000, 1)].into_iter().collect();
    let images = vec![ImageHandover { len: 1 << 30, missing }];
    let map_hash = MapHash::of(&images);
    let body = ToTarget::Prepare { images, map_hash };
    Envelope { epoch: Epoch(4), attempt: Attempt(2), body }
}

#[test]
fn messages_round_trip() {
    let message = prepare();
    let bytes = encode(&message).unwrap();
    let len = decode_len(bytes[..4].try_into().unwrap()).unwrap();
    assert_eq!(len, bytes.len() - 4);
    assert_eq!(decode(&bytes[4..]), Ok(message));
    assert!(decode_len([0xff; 4]).is_err());
    assert!(decode::<ToTarget>(&[&bytes[4..], &[0]].concat()).is_err());
}

#[test]
fn a_map_that_does_not_match_its_hash_is_refused() {
    let mut message = prepare();
    if let ToTarget::Prepare { images, .. } = &mut message.body {
        images[0].missing.insert(BlockRange::new(0, 1));
    }
    let bytes = encode(&message).unwrap();
    assert_eq!(decode::<ToTarget>(&bytes[4..]), Err(WireError::Hash));
}

#[test]
fn a_long_list_is_refused_before_it_is_built() {
    // What follows the list's length is no list at all: whoever looks at it first says so.
    let over = |lists: &[u8], max: usize| {
        let mut count = max as u64 + 1;
        let mut bytes = lists.to_vec();
        while count >= 0x80 {
            bytes.push(count as u8 | 0x80);
            count >>= 7;
        }
        bytes.push(count as u8);
        bytes.resize(bytes.len() + 2 * (max + 1), 0);
        bytes
    };
    let refused = |result: Result<(), WireError>| {
        let why = format!("{:?}", result.expect_err("too long"));
        assert!(!why.contains("TooLong"), "only found out when all of it was built: {why}");
    };
    let none = |body: ToTarget| {
        let message = Envelope { epoch: Epoch(0), attempt: Attempt(0), body };
        let mut bytes = encode(&message).unwrap().split_off(4);
        assert_eq!(bytes.pop(), Some(0), "ends with an empty list");
        bytes
    };
    let order = none(ToTarget::Order { image: ImageIndex(0), ranges: Vec::new() });
    refused(decode::<ToTarget>(&over(&order, MAX_ORDER)).map(drop));
    let hashed = none(ToTarget::Hashed { tag: 1, hashes: Vec::new() });
    refused(decode::<ToTarget>(&over(&hashed, MAX_TAGS)).map(drop));
    let in_place = Vec::new();
    let describes = none(ToTarget::Describes { together: false, link_rate: 0, in_place });
    refused(decode::<ToTarget>(&over(&describes, MAX_IMAGES)).map(drop));
    let none = |body: ToSource| {
        let message = Envelope { epoch: Epoch(0), attempt: Attempt(0), body };
        let mut bytes = encode(&message).unwrap().split_off(4);
        assert_eq!(bytes.pop(), Some(0), "ends with an empty list");
        bytes
    };
    let received = none(ToSource::Received { tags: Vec::new() });
    refused(decode::<ToSource>(&over(&received, MAX_TAGS)).map(drop));
    let hash = none(ToSource::Hash { tag: 1, image: ImageIndex(0), ranges: Vec::new() });
    refused(decode::<ToSource>(&over(&hash, MAX_TAGS)).map(drop));
    let opened = none(ToSource::Opened { state: TargetState::Owner, images: Vec::new() });
    refused(decode::<ToSource>(&over(&opened, MAX_IMAGES)).map(drop));
}

/// Whoever owns the image next counts on from it.
#[test]
fn an_epoch_that_leaves_no_next_one_is_refused() {
    let over = |epoch| HandedOver { epoch, attempt: Attempt(1), map_hash: MapHash::of(&[]) };
    let commit = |epoch, over| {
        let body = ToTarget::Commit(over);
        let bytes = encode(&Envelope { epoch, attempt: Attempt(1), body }).unwrap();
        decode::<ToTarget>(&bytes[4..])
    };
    assert!(commit(Epoch::HIGHEST, over(Epoch::HIGHEST)).is_ok());
    let high = Epoch(MAX_COUNT + 1);
    assert!(commit(high, over(Epoch(2))).is_err() && commit(Epoch(2), over(high)).is_err());
}

#[test]
fn only_messages_with_sets_of_blocks_are_long() {
    let long = MAX_SHORT as usize + 1;
    let head = |bytes: Vec<u8>| bytes[4..].to_vec();
    let most =
        |body: ToTarget| Envelope { epoch: Epoch(MAX_COUNT), attempt: Attempt(MAX_COUNT), body };
    let source = |body: ToTarget| {
        let bytes = head(encode(&most(body)).unwrap());
        check_kind::<ToTarget>(&bytes[..KIND_LEN.min(bytes.len())], long).is_ok()
    };
    let target = |body: ToSource| {
        let envelope = Envelope { epoch: Epoch(1), attempt: Attempt(2), body };
        check_kind::<ToSource>(&head(encode(&envelope).unwrap()), long).is_ok()
    };
    assert!(source(prepare().body) && source(ToTarget::Vm(Vec::new())));
    assert!(target(ToSource::Opened { state: TargetState::Owner, images: Vec::new() }));
    assert!(!source(ToTarget::Ping) && !source(ToTarget::Hashed { tag: 1, hashes: Vec::new() }));
    assert!(!target(ToSource::Received { tags: vec![1; 9] }) && !target(ToSource::Vm(Vec::new())));
    assert!(check_kind::<ToSource>(&[0xff; KIND_LEN], long).is_err(), "no kind at all");
    assert!(check_kind::<ToSource>(&[], MAX_SHORT as usize).is_ok(), "each may be short");
    // The longest of the others.
    let hashes = vec![[7; 16]; MAX_TAGS];
    let hashed = encode(&most(ToTarget::Hashed { tag: u64::MAX, hashes })).unwrap().len();
    let run = BlockRange::new(u64::MAX >> 12, 256);
    let ranges = vec![run; MAX_ORDER];
    let order = encode(&most(ToTarget::Order { image: ImageIndex(9), ranges })).unwrap().len();
    let data = Ok(vec![0xff; MAX_PEEK as usize]);
    let peeked = encode(&most(ToTarget::Peeked { tag: u64::MAX, data })).unwrap().len();
    assert!([hashed, order, peeked].iter().all(|len| *len <= MAX_SHORT as usize));
}

/// Five bytes each as they come, and a hundred when they are decoded.
#[test]
fn sets_have_no_more_parts_together_than_images_can_have() {
    let image = |parts: u64| {
        let runs = (0..parts).map(|leaf| BlockRange::new(leaf * 32_768, 1));
        ImageHandover { len: 1 << 50, missing: runs.collect() }
    };
    let decoded = |images: Vec<ImageHandover>| {
        let map_hash = MapHash::of(&images);
        let body = ToTarget::Prepare { images, map_hash };
        let bytes = encode(&Envelope { epoch: Epoch(4), attempt: Attempt(2), body }).unwrap();
        decode::<ToTarget>(&bytes[4..])
    };
    assert!(decoded(vec![image(MAX_PARTS / 2), image(MAX_PARTS / 2)]).is_ok());
    assert!(decoded(vec![image(MAX_PARTS / 2), image(MAX_PARTS / 2), image(1)]).is_err());
}

#[test]
fn ranges_and_lists_are_bounded() {
    let over = |body: ToSource| {
        let bytes = encode(&Envelope { epoch: Epoch(0), attempt: Attempt(0), body }).unwrap();
        decode::<ToSource>(&bytes[4..]).is_err()
    };
    let fetch = |range| ToSource::Fetch { tag: 1, image: ImageIndex(0), range, urgent: false };
    assert!(over(fetch(BlockRange::new(0, 257))));
    assert!(over(fetch(BlockRange::new(0, 0))));
    assert!(over(fetch(BlockRange::new(u64::MAX, 2))));
    assert!(!over(fetch(BlockRange::new(7, 256))));
    let describe =
        |range| ToSource::Describe { tag: 1, image: ImageIndex(0), range, blocks: false };
    assert!(over(describe(BlockRange::new(0, 272))) && over(describe(BlockRange::new(8, 16))));
    assert!(over(describe(BlockRange::new(16, 8))) && over(describe(BlockRange::new(16, 0))));
    assert!(!over(describe(BlockRange::new(16, 256))));
    assert!(over(ToSource::Received { tags: vec![0; MAX_TAGS + 1] }));
    let order = |ranges| {
        let body = ToTarget::Order { image: ImageIndex(0), ranges };
        let bytes = encode(&Envelope { epoch: Epoch(0), attempt: Attempt(0), body }).unwrap();
        decode::<ToTarget>(&bytes[4..])
    };
    assert!(order(vec![BlockRange::new(0, 1); MAX_ORDER]).is_ok());
    assert!(order(vec![BlockRange::new(0, 1); MAX_ORDER + 1]).is_err());
}

/// Numbers of variants are the protocol: new ones come at the end, and these stay.
#[test]
fn golden_bytes_of_messages() {
    let bytes = |body: ToTarget| {
        encode(&Envelope { epoch: Epoch(4), attempt: Attempt(2), body }).unwrap()[4..].to_vec()
    };
    let ranges = vec![BlockRange::new(1024, 256), BlockRange::new(0, 3)];
    let order = ToTarget::Order { image: ImageIndex(1), ranges };
    assert_eq!(bytes(order), [4, 2, 10, 1, 2, 0x80, 8, 0x80, 2, 0, 3]);
    assert_eq!(bytes(ToTarget::Defer), [4, 2, 11]);
    assert_eq!(bytes(ToTarget::Ping), [4, 2, 9]);
    assert_eq!(bytes(ToTarget::Void), [4, 2, 3]);
    let lack = ToSource::Lack { tag: 300, pieces: 0b101 };
    let lack = encode(&Envelope { epoch: Epoch(4), attempt: Attempt(2), body: lack }).unwrap();
    assert_eq!(lack[4..], [4, 2, 15, 0xac, 2, 5]);
    let near = ToSource::Near { tag: 300, pieces: 0b101, near: 0b100 };
    let near = encode(&Envelope { epoch: Epoch(4), attempt: Attempt(2), body: near }).unwrap();
    assert_eq!(near[4..], [4, 2, 16, 0xac, 2, 5, 4]);
    let body = ToSource::LackBlocks { tag: 300, blocks: [1, 0, 2, 0] };
    assert!(body.is_reuse());
    let lack = encode(&Envelope { epoch: Epoch(4), attempt: Attempt(2), body }).unwrap();
    assert_eq!(lack[4..], [4, 2, 17, 0xac, 2, 1, 0, 2, 0]);
    let (image, range) = (ImageIndex(1), BlockRange::new(16, 32));
    let body = ToSource::Describe { tag: 300, image, range, blocks: true };
    assert!(body.is_reuse());
    let ask = encode(&Envelope { epoch: Epoch(4), attempt: Attempt(2), body }).unwrap();
    assert_eq!(ask[4..], [4, 2, 18, 0xac, 2, 1, 16, 32, 1]);
    let describes = ToTarget::Describes { together: true, link_rate: 300, in_place: vec![image] };
    assert!(describes.is_reuse());
    assert_eq!(bytes(describes), [4, 2, 12, 1, 0xac, 2, 1, 1]);
    let jumps = ToTarget::Jumps { nanos: 300 };
    assert_eq!(bytes(jumps), [4, 2, 13, 0xac, 2]);
    assert!(!ToTarget::Void.is_reuse());
}

proptest! {
    #[test]
    fn noise_never_panics(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = decode::<ToTarget>(&bytes);
        let _ = decode::<ToSource>(&bytes);
    }
}

#[test]
fn what_a_peer_says_is_harmless_once_it_is_decoded() {
    let evil = "\x1b[2J".repeat(1000);
    let told = |body: ToSource| {
        let envelope = Envelope { epoch: Epoch(1), attempt: Attempt(0), body };
        let bytes = encode(&envelope).unwrap();
        decode::<ToSource>(&bytes[4..]).unwrap().body
    };
    let failed = Refusal::new(ErrorKind::Io, evil.clone(), &evil).hint(evil.clone());
    let ToSource::Failed(Refusal { what, why, hint, .. }) = told(ToSource::Failed(failed)) else {
        panic!("not as sent")
    };
    for text in [what, why, hint.unwrap()] {
        assert!(text.len() <= 1024 && !text.contains(char::is_control), "{text:?}");
    }
    let data = Err(evil.into());
    let envelope =
        Envelope { epoch: Epoch(1), attempt: Attempt(0), body: ToTarget::Peeked { tag: 1, data } };
    let bytes = encode(&envelope).unwrap();
    let ToTarget::Peeked { data: Err(why), .. } = decode::<ToTarget>(&bytes[4..]).unwrap().body
    else {
        panic!("not as sent")
    };
    let why = why.to_string();
    assert_eq!(postcard::to_allocvec(&Why::from(&*why)), postcard::to_allocvec(&why), "one text");
    assert!(why.len() <= 1024 && !why.contains(char::is_control), "{why:?}");
}
