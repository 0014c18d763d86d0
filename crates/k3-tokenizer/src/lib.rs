//! The Kimi K3 tokenizer: text to ids and back, exact to tiktoken
