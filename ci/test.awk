# Reads `cargo test -- --show-output`; passes on everything but what passing tests printed, and
# counts. A binary that began and gave no result has failed, whatever it was.
function close_binary() {
    if (open) { died++; print "    no result: " binary }
    open = 0
}

/^ *(Running|Doc-tests) / { close_binary(); open = 1; binary = $0; quiet = 0; test = "" }
/^successes:$/ { quiet = 1 }
/^failures:$/ { quiet = 0; test = "" }

quiet && /^---- .* stdout ----$/ { test = $2 }
quiet && /^(SKIP|SKIPPED): / && test != "" {
    if (!((binary, test) in reason)) { skips++; listed[skips] = test ": " $0 }
    reason[binary, test] = 1
}

/^test result: (ok|FAILED)\. [0-9]+ passed; / {
    quiet = 0; open = 0
    for (i = 1; i < NF; i++) {
        if ($(i + 1) ~ /^passed/) passed += $i
        if ($(i + 1) ~ /^failed/) failed += $i
        if ($(i + 1) ~ /^ignored/) ignored += $i
    }
}

/^error(\[|: could not compile|: no such|: failed)/ { broken = 1 }
!quiet { print; fflush() }

END {
    close_binary()
    failed += died
    if (broken && !failed) failed = 1
    for (i = 1; i <= skips; i++) print "skipped " listed[i]
    printf "%d passed, %d failed, %d skipped\n", passed - skips, failed, skips + ignored
    exit failed > 0
}
