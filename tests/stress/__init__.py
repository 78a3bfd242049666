"""Programs that damage runs and files and check the result. `make stress` runs them, pytest does not."""
