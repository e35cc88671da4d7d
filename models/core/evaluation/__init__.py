"""What tells whether a draft or a changed target is good enough: scores, intervals, the gate, the watch."""
