"""What damages a run, and sees what comes of it: programs that no test collects (`make stress`)."""
