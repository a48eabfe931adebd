"""What a sample request asks for: its validation, where samples end, and the scores of prompts."""
