"""What is trained, in its places: reads and writes it, and moves it between them."""
