"""What search.py is made of: the space, a trial, the study, and its page."""
