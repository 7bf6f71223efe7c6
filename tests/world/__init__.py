"""What the tests share: the world around the part that one of them looks at."""
