//! XTML, the chat encoding of Kimi K3: conversations to segments, and reply ids to events
