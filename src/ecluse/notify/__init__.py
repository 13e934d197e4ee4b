"""Notifications to people and programs, by signed webhook, mail, Slack or PagerDuty: best effort, never at the expense
of the run they are about. `flow.py` is the flow of one delivery; `dispatch.py` decides which recipients get which
events."""
