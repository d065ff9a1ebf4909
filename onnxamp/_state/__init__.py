"""What an interrupted job has done, kept in a file."""
