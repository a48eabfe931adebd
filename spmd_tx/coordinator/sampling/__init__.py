"""From a sample request to Prefill and Decode commands and back: admission, pages, batches."""
