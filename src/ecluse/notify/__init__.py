"""Telling people and programs what happened, by signed webhook or mail: best effort, never at the expense of the run it
is about. `flow.py` is the path of one delivery; `dispatch.py` decides who is told what."""
