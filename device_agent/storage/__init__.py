"""What survives a power cut: durable files, objects, slots, floors and the journal."""
