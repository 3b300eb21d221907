-- Which recorded calls of node `router` a round may learn from. Edit this file; the next round uses it as it then stands.
--
-- What you can read:
--   calls   one row per model call: id, trace_id, tenant, app, process_node, model_name, policy_version, arm, input,
--           output, status, agent_version, subject, consent, request_time, ... The row with process_node 'end2end'
--           holds the whole task: what the user asked for and what the agent answered.
--   scores  what was said about a trace later: target_kind ('trace' or 'call'), target_id, name, value, source, ...
-- What you must return: `id` and `input` of calls of the node, in the order in which they are to be taken; a round takes
-- as many from the top as samples_per_round and validation_samples in noria.toml say.
-- What is filled in: $app, $node, $tenant (whose calls), $seed and $round (so that each round sees another order).
--
-- Ideas, each one more line under `WHERE`:
--   only the last week            AND c.request_time > now() - INTERVAL 7 DAY
--   only one build of the agent   AND c.agent_version = '0123456789ab'
--   only where the tool was wrong AND EXISTS (SELECT 1 FROM scores s WHERE s.target_kind = 'trace'
--                                     AND s.target_id = c.trace_id AND s.name = 'right_function' AND s.value < 1)
WITH candidates AS (
    SELECT
        c.id,
        c.input,
        -- What the user wrote: the last message. Two spellings that differ only in case and spaces are one query.
        lower(trim(regexp_replace(
            TRY(json_extract_string(c.input, '$.messages[#-1].content')), '[ \t\n\f\r]+', ' ', 'g'
        ))) AS query
    FROM calls AS c
    WHERE c.tenant = $tenant
      AND c.app = $app
      AND c.process_node = $node
      AND c.status = 'ok'
      AND c.consent
      AND c.arm <> 'rollout'  -- a rollout is an experiment of ours, not a user's request
      -- The business system has said which tool was right: without that there is nothing to reward.
      AND EXISTS (
          SELECT 1 FROM scores AS s
          WHERE s.target_kind = 'trace' AND s.target_id = c.trace_id AND s.name = 'right_function'
            AND TRY(json_extract_string(s.explanation, '$.expected')) IS NOT NULL
      )
      -- The task ended well, and its request is known, so that it can be run again.
      AND EXISTS (
          SELECT 1 FROM calls AS e
          WHERE e.trace_id = c.trace_id AND e.process_node = 'end2end' AND e.status = 'ok'
      )
)
SELECT id, input
FROM candidates
WHERE left(sha256(query), 2) >= '4d'  -- never learn from what the evaluation asks (the rule of examples/dispatch/data.py)
QUALIFY row_number() OVER (PARTITION BY query ORDER BY id DESC) = 1  -- each query once: its latest call
ORDER BY md5(concat_ws('/', query, CAST($seed AS VARCHAR), CAST($round AS VARCHAR))), id
