"""One program for each question of speed: contenders side by side, as a table and a last line of JSON."""
