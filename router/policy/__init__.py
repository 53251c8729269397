"""Which worker gets this request? Pure: values in, a decision out."""
