"""The trainer: from a submission's tokens and rewards to new adapter versions, in a process of its own."""
