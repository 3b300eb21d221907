"""What every station of the wheel hands to the next: frozen dataclasses and enums, without I/O, torch or Dagster.

Glossary
--------
trace        one decision process of the agent, from the user's request to its answer (W3C trace id)
node         a named place in the agent that calls a model; `end2end` stands for the whole task
target       what is trained: `"{app}.{node}"`
round        one turn of the wheel for one target: `"{target}.r{number:05d}"`; also the name of the weights it made
rollout      one controlled run of the real agent on a recorded request
trajectory   what one rollout did, step by step, with the exact token ids
group        the rollouts that share one sample; advantages are relative to their mean (GRPO)
policy       a model version that answers the target's calls
"""
