-- Shared: the clock, state indexes, events. `H` is the one table that helpers live in (Lua 5.1 allows 60 upvalues).
-- P is always the namespace's root key, `gpulayer:{ns}:`, which routes every call to one slot.

function H.now()
  local t = redis.call('TIME')
  local us = tonumber(t[2])
  return t[1] * 1000 + (us - us % 1000) / 1000
end

function H.job(P, id) return P .. 'job:' .. id end

local TRIM_EVERY = 64
local untrimmed, how_many = {}, 0                -- events since the last trim, of the namespaces that were met last

local function is_due(P)
  if not untrimmed[P] then
    if how_many == 1024 then untrimmed, how_many = {}, 0 end
    how_many = how_many + 1
  end
  untrimmed[P] = (untrimmed[P] or 0) + 1
  if untrimmed[P] < TRIM_EVERY then return false end
  untrimmed[P] = 0
  return true
end

-- one event a transition, at the time that its entry's id tells: page and API treat them as hints, so the stream is capped, now and
-- then; returns the id
function H.event(P, id, state)
  if is_due(P) then return redis.call('XADD', P .. 'events', 'MAXLEN', '~', '10000', '*', 'job', id, 'state', state) end
  return redis.call('XADD', P .. 'events', '*', 'job', id, 'state', state)
end

local seen                                       -- a millisecond in which the clock was certainly looked at

-- the time of an event that was just written, by its entry's id, which costs less than to ask the clock. An id is never below that of
-- the entry before: one that repeats a time is believed where that was seen by the clock, and not too often in a row
function H.told_at(entry)
  local ms, n = string.match(entry, '^(%d+)%-(%d+)$')
  if n ~= '0' and (ms ~= seen or n % 64 == 0) then ms = string.format('%d', H.now()) end
  seen = ms
  return ms
end

-- moves a job between the state indexes; the score is the age at submit, so pages stay stable
function H.index(P, id, from, to, score)
  if from then H.place(P .. 'jobs:' .. from, id, nil) end
  H.place(P .. 'jobs:' .. to, id, score)
end

H.PRIORITIES = {'0', '1', '2', '3', '4'}
H.FINAL = {succeeded = true, failed = true, cancelled = true, timed_out = true}

function H.config(P, name, default) return tonumber(redis.call('HGET', P .. 'config', name) or nil) or default end

-- a whole number as a record should hold it; 0 for anything else
function H.digits(text) return text and string.find(text, '^%d+$') and text or '0' end

function H.refuse(code, text) return redis.error_reply('GPULAYER ' .. code .. ' ' .. text) end

local function damaged(what, why) return 'GPULAYER damaged ' .. what .. ' does not hold what the queue wrote (' .. why .. ')' end

-- ends the call: `what` holds something else
function H.fail(what, why) error({err = damaged(what, why)}) end

-- an error on the way, as one line. That of a key which somebody else wrote says so; the server's own ones (no memory, a full
-- disk) stay what they are
function H.broken(name, P, problem)
  local why = type(problem) == 'table' and problem.err or tostring(problem)
  if string.find(why, '^WRONGTYPE') then why = damaged('a key below ' .. P, why) end
  if not string.find(why, '^%u+ ') then why = 'GPULAYER failed ' .. name .. ': ' .. why end
  return {err = why}
end
