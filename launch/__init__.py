"""What starts a run on one machine or many, and what checks these before."""
