"""Run-time changes to a Megatron release, one file per thing changed; installed as `megatron_dynatrain.patches`."""
