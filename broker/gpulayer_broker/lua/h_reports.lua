-- Shared: an attempt's report, as commit and commit_calls take it.

local TAKES = {result = true, result_kind = true, error = true, outputs = true, usage = true, logs = true, options = true,
               retries = true, notes = true, barrier = true, keep_ms = true}

local VERDICTS = {succeeded = true, failed = true, timed_out = true, cancelled = true, retry = true}

-- a report {token, verdict, reason, delay, fields} of the arguments from i on, with n fields (name, value, …) at i_n; the index
-- behind it, or nil and a refusal
function H.report_at(A, token, verdict, reason, delay, i_n)
  local r = {token = token, verdict = verdict, reason = reason, delay = tonumber(delay), fields = {}}
  if not VERDICTS[verdict] or not r.delay then return nil, H.refuse('verdict', verdict .. ' after ' .. delay .. ' ms') end
  local n = 2 * tonumber(A[i_n])
  for k = 1, n do
    if k % 2 == 1 and not TAKES[A[i_n + k]] then return nil, H.refuse('field', 'commit does not write ' .. A[i_n + k]) end
    r.fields[k] = A[i_n + k]
  end
  return r, i_n + n + 1
end

-- a cancelled attempt keeps its logs, outputs and usage; what it came to no longer counts
local function beside_the_end(fields)
  local out = {}
  for i = 1, #fields, 2 do
    if fields[i] ~= 'error' and fields[i] ~= 'result' and fields[i] ~= 'result_kind' then
      out[#out + 1] = fields[i]
      out[#out + 1] = fields[i + 1]
    end
  end
  return out
end

local function end_attempt(P, j, r, now)
  if r.verdict == 'succeeded' then return H.finish(P, j, 'succeeded', '', r.fields, now) end
  if j.cancel ~= '' then
    H.finish(P, j, 'cancelled', 'cancelled', beside_the_end(r.fields), now)
    return 'cancelled'
  end
  if r.verdict == 'retry' then return H.later(P, j, r.fields, r.delay, now) end
  return H.finish(P, j, r.verdict, r.reason, r.fields, now)
end

-- ends the attempt if the report is its holder's: ok, cancelled, already or stale
function H.report(P, j, r, now)
  if not H.holds(j, r.token) then
    return j and r.token ~= '' and j.ended_token == r.token and 'already' or 'stale'
  end
  j.reported = true
  return end_attempt(P, j, r, now) == 'cancelled' and 'cancelled' or 'ok'
end
