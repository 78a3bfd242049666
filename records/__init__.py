"""Records: the rungs of a ladder, run by the real programs over several seeds, written down, and shown.

rungs.py is the ladder; seeds.py runs a seed, and goes on where one was interrupted; statistics.py says
whether a goal is held; book.py keeps records in records/; page.py makes tables and curves of them.
"""
