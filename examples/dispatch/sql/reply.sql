-- Which recorded calls of node `reply` a round may learn from. How to edit it stands at the top of router.sql.
--
-- The reward of this node needs nobody's feedback: the right answer stands in the request itself, the tool's result.
WITH candidates AS (
    SELECT
        c.id,
        c.input,
        -- The tool's result that is to be phrased: the last message.
        TRY(json_extract_string(c.input, '$.messages[#-1].content')) AS result
    FROM calls AS c
    WHERE c.tenant = $tenant
      AND c.app = $app
      AND c.process_node = $node
      AND c.status = 'ok'
      AND c.consent
      AND c.arm <> 'rollout'  -- a rollout is an experiment of ours, not a user's request
      -- The task ended well, and its request is known, so that it can be run again.
      AND EXISTS (
          SELECT 1 FROM calls AS e
          WHERE e.trace_id = c.trace_id AND e.process_node = 'end2end' AND e.status = 'ok'
      )
)
SELECT id, input
FROM candidates
WHERE left(sha256(lower(trim(regexp_replace(result, '[ \t\n\f\r]+', ' ', 'g')))), 2) >= '4d'  -- held out for evaluation
QUALIFY row_number() OVER (PARTITION BY result ORDER BY id DESC) = 1  -- each result once: its latest call
ORDER BY md5(concat_ws('/', result, CAST($seed AS VARCHAR), CAST($round AS VARCHAR))), id
