"""Views: what people are shown, of typed plain data. Charts, the report, gate reports, tables of results.

A view asks nobody and computes nothing that it does not show. What it is given is defined here, so that commands, tasks
and services can all fill it.
"""

MEANING = "τ is the mean accepted length, 1 + accepted draft tokens / verification steps"
