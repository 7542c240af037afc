"""Methods: selection, group sizes, gates, filters, advantages, corrections, policy losses. One method, one file (ARRoL
a folder); what all of a kind share is in its `base.py`."""
