//! The parts of a host that do not work at the moment, printed before everything else.

use super::style::Style;
use dray_api::Trouble;

/// Each in a line, and what to do in another.
pub fn lines(troubles: &[Trouble], style: Style) -> String {
    let mut text = String::new();
    for trouble in troubles {
        text += &format!("{} {}: {}\n", style.bad("trouble:"), trouble.what, trouble.why);
        if let Some(hint) = &trouble.hint {
            text += &format!("{} {hint}\n", style.good("hint:"));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_says_what_why_and_what_to_do() {
        let trouble = |hint: Option<&str>| Trouble {
            key: "pool.ssd".to_owned(),
            what: "pool 'ssd' cannot be used".to_owned(),
            why: "/srv: it is not there".to_owned(),
            hint: hint.map(str::to_owned),
            since_unix_ms: 1,
        };
        let text = lines(&[trouble(Some("mount it")), trouble(None)], Style { colour: false });
        let line = "trouble: pool 'ssd' cannot be used: /srv: it is not there\n";
        assert_eq!(text, format!("{line}hint: mount it\n{line}"));
        assert_eq!(lines(&[], Style { colour: false }), "");
    }
}
