"""A support desk that learns to sort tickets and find order numbers."""
